"""Where a run keeps its state and puts its drafter: whole or not at all, and never over something else."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow.fs
import pytest

from pipelines.train_config import TrainError
from pipelines.train_storage import LocalStorage, RemoteStorage, patient_filesystem, train_storage

CONFIG = json.dumps({"architectures": ["DraftloopMtpModel"]})


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def finished(folder: Path, **files: str) -> Path:
    """A drafter, ready to be installed."""
    for name, text in ({"config.json": CONFIG, "model.safetensors": "new", "tensorboard/events": "e"} | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_hidden_files_in_a_folder_are_kept(tmp_path: Path):
    output = tmp_path / "drafter"
    output.mkdir()
    (output / ".DS_Store").write_text("")
    storage = train_storage(str(output))
    storage.check()
    storage.install(finished(storage.staging_folder() / "drafter"))
    assert sorted(p.name for p in output.iterdir()) == [".DS_Store", "config.json", "model.safetensors", "tensorboard"]


def test_addresses_of_folders_are_folders(tmp_path: Path):
    for name in (f"file://{tmp_path}/drafter", str(tmp_path / "drafter")):
        storage = train_storage(name)
        assert isinstance(storage, LocalStorage)
        assert (storage.output, storage.work) == (tmp_path / "drafter", tmp_path / ".drafter.training")
    with pytest.raises(TrainError, match="output nowhere://x cannot be used"):
        train_storage("nowhere://x")


def test_an_uploaded_drafter_replaces_the_older_one_file_by_file(memory, tmp_path: Path, monkeypatch):
    """Its config.json goes first and comes last, so that no reader takes a mixture for a drafter."""
    for name, text in (("config.json", CONFIG), ("evaluation.json", "{}"), ("model.safetensors", "old")):
        memory.pipe_file(f"/here/drafter/{name}", text.encode())
    storage = train_storage("memory://here/drafter")
    storage.check()
    order: list[str] = []
    for method in ("rm_file", "put_file"):
        plain = getattr(type(memory), method)

        def noted(self, *paths, plain=plain, method=method, **options):
            order.append(f"{method} {paths[-1].rsplit('drafter/', 1)[-1]}")
            return plain(self, *paths, **options)

        monkeypatch.setattr(type(memory), method, noted)
    storage.install(finished(tmp_path / "drafter"))
    assert order[0] == "rm_file config.json"
    assert order[-1] == "put_file config.json"
    assert sorted(memory.find("/here/drafter")) == [
        f"/here/drafter/{name}" for name in ("config.json", "model.safetensors", "tensorboard/events")
    ]
    assert memory.cat("/here/drafter/model.safetensors") == b"new"


def test_after_an_interrupted_upload_the_same_command_goes_on(memory, tmp_path: Path):
    storage = train_storage("memory://here/drafter")
    memory.pipe_file("/here/.drafter.training/run/state", b"state")
    memory.pipe_file("/here/drafter/model.safetensors", b"half")
    storage.check()
    storage.install(finished(tmp_path / "drafter"))
    storage.clear()
    assert memory.cat("/here/drafter/model.safetensors") == b"new"
    memory.rm_file("/here/drafter/config.json")
    with pytest.raises(TrainError, match="holds other files"):  # without a run's state nobody knows whose they are
        storage.check()


@pytest.mark.parametrize(
    ("files", "named"),
    [({"thesis.txt": ""}, "thesis.txt"), ({"config.json": '{"architectures": ["Llama"]}'}, "config")],
)
def test_other_files_are_never_replaced(memory, files, named):
    for name, text in files.items():
        memory.pipe_file(f"/here/drafter/{name}", text.encode())
    with pytest.raises(TrainError, match=rf"memory://here/drafter holds other files \({named}"):
        train_storage("memory://here/drafter").check()
    with pytest.raises(
        TrainError, match=r"memory://here is a whole bucket; give a folder in it, such as memory://here/d"
    ):
        RemoteStorage("memory://here")


def test_a_run_s_state_is_removed_at_the_end(memory):
    storage = RemoteStorage("memory://here/drafter")
    storage.check()
    storage.clear()
    assert memory.find("/here") == []
    fs, path = storage.run_options["storage_filesystem"], storage.run_options["storage_path"]
    assert path.endswith("here/.drafter.training")
    for name in ("a/state", "b/state"):
        with fs.open_output_stream(f"{path}/{name}") as stream:
            stream.write(b"state")
    assert len(memory.find("/here")) == 2
    storage.clear()
    assert memory.find("/here") == []


def test_what_ray_train_does_with_a_file_system(memory, tmp_path: Path):
    fs = pickle.loads(pickle.dumps(patient_filesystem("memory://here")))
    (tmp_path / "saved" / "inner").mkdir(parents=True)
    (tmp_path / "saved" / "inner" / "state").write_bytes(b"x" * 300_000)
    (tmp_path / "saved" / "empty").write_bytes(b"")
    fs.create_dir("/here/run/checkpoint")
    assert memory.find("/here") == [], "an object store has no folders"
    local = pyarrow.fs.LocalFileSystem()
    saved = str(tmp_path / "saved")
    pyarrow.fs.copy_files(saved, "/here/run/checkpoint", source_filesystem=local, destination_filesystem=fs)
    names = {info.base_name for info in fs.get_file_info(pyarrow.fs.FileSelector("/here/run/checkpoint"))}
    assert names == {"inner", "empty"}
    back = str(tmp_path / "back")
    pyarrow.fs.copy_files("/here/run/checkpoint", back, source_filesystem=fs, destination_filesystem=local)
    assert (tmp_path / "back" / "inner" / "state").read_bytes() == b"x" * 300_000
    fs.delete_dir("/here/run/checkpoint")
    assert fs.get_file_info("/here/run/checkpoint/empty").type == pyarrow.fs.FileType.NotFound


def test_an_upload_is_tried_again(memory, monkeypatch):
    fs = patient_filesystem("memory://here")
    fails = iter([ConnectionRefusedError(), ConnectionResetError()])
    plain = type(memory).put_file

    def put(self, *paths, **options):
        for error in fails:
            raise error
        return plain(self, *paths, **options)

    monkeypatch.setattr(type(memory), "put_file", put)
    monkeypatch.setattr("drafters.remote.time.sleep", lambda seconds: None)
    with fs.open_output_stream("/here/state") as stream:
        stream.write(b"one ")
        stream.write(b"two")
    assert memory.cat("/here/state") == b"one two"
