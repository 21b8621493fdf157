// In: a function to run on T threads. Out: a process-wide pool of workers that spin briefly and then sleep, and a spin
// barrier that yields when a partner was descheduled, so that more threads than cores get slow but never hang.
#pragma once
#include <pthread.h>
#include <sched.h>

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

// Spin until `ready()`: pauses first (about 70 us), then a yield at every try.
template <class Ready>
inline void spin_until(Ready ready) {
    for (int tries = 0; !ready(); ++tries) {
        if (tries < 4000) cpu_pause();
        else sched_yield();
    }
}

class Barrier {
public:
    void wait(int threads) {
        if (threads == 1) return;
        const uint32_t now = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(now + 1, std::memory_order_release);
        } else {
            spin_until([&] { return generation_.load(std::memory_order_acquire) != now; });
        }
    }

private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
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
        running_.store(threads - 1, std::memory_order_relaxed);
        for (int i = 0; i < threads - 1; ++i) workers_[i]->call();
        job(context, 0);
        spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
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
            for (int tries = 0; tries < 6000; ++tries) {
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
                job_(context_, thread);
                running_.fetch_sub(1, std::memory_order_release);
            }
        }).detach();
    }

    std::mutex turn_;
    std::vector<std::unique_ptr<Worker>> workers_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int> running_{0};
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
