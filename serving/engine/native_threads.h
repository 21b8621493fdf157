// In: a function to run on T threads. Out: a process-wide pool of workers, and a barrier, that spin briefly and then
// sleep, so that more threads than cores get slow but never hang.
#pragma once
#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits spin for about 70 us, then sleep in the kernel: a partner that lost its core to another process gets it back
// sooner when nobody spins against it.
constexpr int SPINS = 4000;

class Barrier {
public:
    void wait(int threads) {
        if (threads == 1) return;
        const int32_t now = generation_.load();
        if (arrived_.fetch_add(1) + 1 == threads) {
            arrived_.store(0);
            generation_.store(now + 1);
            if (sleepers_.load()) wake();
            return;
        }
        for (int tries = 0; tries < SPINS; ++tries) {
            if (generation_.load(std::memory_order_acquire) != now) return;
            cpu_pause();
        }
        sleepers_.fetch_add(1);
        while (generation_.load() == now) sleep_while(now);
        sleepers_.fetch_sub(1);
    }

private:
#if defined(__linux__)
    void sleep_while(int32_t now) { syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(int32_t) { sched_yield(); }
    void wake() {}
#endif

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int32_t> generation_{0};
    alignas(64) std::atomic<int> sleepers_{0};
};

class Pool {
public:
    using Job = void (*)(void* context, int thread);

    // Runs job(context, t) for t in 0..threads-1; the caller is thread 0. Calls from several threads take turns.
    void run(int threads, Job job, void* context) {
        std::lock_guard<std::mutex> turn(turn_);
        while (static_cast<int>(workers_.size()) < threads - 1) add_worker();
        job_ = job;
        context_ = context;
        threads_ = threads;
        for (int i = 0; i < threads - 1; ++i) workers_[i]->call();
        job(context, 0);
        done_.wait(threads);
    }

private:
    struct alignas(64) Worker {
        std::atomic<uint32_t> calls{0};
        std::atomic<bool> asleep{false};
        std::mutex mutex;
        std::condition_variable wake;

        void call() {
            calls.fetch_add(1);
            if (!asleep.load()) return;
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_one();
        }

        void wait_for_call(uint32_t seen) {
            for (int tries = 0; tries < SPINS; ++tries) {
                if (calls.load(std::memory_order_acquire) != seen) return;
                cpu_pause();
            }
            std::unique_lock<std::mutex> lock(mutex);
            asleep.store(true);
            wake.wait(lock, [&] { return calls.load() != seen; });
            asleep.store(false);
        }
    };

    void add_worker() {
        workers_.push_back(std::make_unique<Worker>());
        Worker* worker = workers_.back().get();
        const int thread = static_cast<int>(workers_.size());
        std::thread([this, worker, thread] {
            for (uint32_t seen = 0;; ++seen) {
                worker->wait_for_call(seen);
                const int threads = threads_;
                job_(context_, thread);
                done_.wait(threads);
            }
        }).detach();
    }

    std::mutex turn_;
    std::vector<std::unique_ptr<Worker>> workers_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    int threads_ = 0;
    Barrier done_;
};

// Never freed: workers may sleep in it when the process ends. A forked child has no workers and starts a new pool.
inline Pool*& pool_slot() {
    static Pool* pool = [] {
        pthread_atfork(nullptr, nullptr, [] { pool_slot() = new Pool; });
        return new Pool;
    }();
    return pool;
}

template <class Body>
inline void run_on_threads(int threads, Body& body) {
    pool_slot()->run(threads, [](void* context, int thread) { (*static_cast<Body*>(context))(thread); }, &body);
}
