"""Data too large for a list, or drawn without a dataset, in runs with real workers and real kills."""

from __future__ import annotations

import json
import tarfile
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from harness import SCRIPTS, Job, run_script

import elastic_launch as el
from elastic_launch.errors import UsageError

STREAMING = Path(__file__).parents[2] / "examples" / "streaming" / "train.py"
OFFSETS = str(Path(__file__).parents[2] / "examples" / "random_offsets" / "train.py")


@pytest.mark.slow  # test_loader has the same without workers
def test_a_thousand_million_samples_start_within_a_second(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=[str(SCRIPTS / "virtual.py"), str(job.directory)])
    assert agent.wait(100) == 0, agent.output
    ranks = [json.loads((job.directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        # CPU time: other tests run beside this one.
        assert rank["cpu"] < 1, rank
        assert rank["MiB"] < 100, rank
        assert len(rank["indices"]) == 4 * 32
    assert len({index for rank in ranks for index in rank["indices"]}) == 4 * 64


@pytest.mark.slow  # test_function_loader has the same without workers
def test_random_offsets_have_the_undisturbed_hash_through_three_kills(job: Job) -> None:
    options = ["--exact", "--steps", "60", "--result"]
    alone, killed = job.directory / "alone.json", job.directory / "killed.json"
    run_script(OFFSETS, *options, str(alone))
    plan = [
        {"rank": 1, "step": 15, "round": 1},
        {"rank": 0, "step": 30, "round": 2},
        {"rank": 1, "step": 45, "round": 3},
    ]
    env = {"ELASTIC_LAUNCH_FAULTS": json.dumps(plan)}
    agent = job.launch("--standalone", "--nproc", "2", command=[OFFSETS, *options, str(killed)], env=env)
    assert agent.wait(100) == 0, agent.output
    undisturbed, result = json.loads(alone.read_text()), json.loads(killed.read_text())
    assert agent.output.count("ended with signal 9 (SIGKILL)") == 3
    assert (result["restarts"], result["worlds"]) == (3, [2, 2, 2, 2])
    assert result["resumed_step"] > 0
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["loss"] == undisturbed["loss"]


needs_webdataset = pytest.mark.skipif(
    find_spec("webdataset") is None, reason="webdataset is not installed: pip install '.[streaming]'"
)


@pytest.mark.slow  # test_streams has the same with shards in memory
@pytest.mark.executed
@needs_webdataset
def test_a_webdataset_has_the_undisturbed_hash_through_three_kills(job: Job) -> None:
    shards = str(job.directory / "shards")
    alone, killed = job.directory / "alone.json", job.directory / "killed.json"
    for options in (["--make"], ["--exact", "--result", str(alone)]):
        run_script(str(STREAMING), shards, *options)
    plan = [
        {"rank": 1, "step": 20, "round": 1},
        {"rank": 0, "step": 50, "round": 2},
        {"rank": 1, "step": 80, "round": 3},
    ]
    env = {"ELASTIC_LAUNCH_FAULTS": json.dumps(plan)}
    command = [str(STREAMING), shards, "--exact", "--loader-workers", "2", "--result", str(killed)]
    agent = job.launch("--standalone", "--nproc", "2", command=command, env=env)
    assert agent.wait(100) == 0, agent.output
    undisturbed, result = json.loads(alone.read_text()), json.loads(killed.read_text())
    assert agent.output.count("ended with signal 9 (SIGKILL)") == 3
    assert (result["restarts"], result["worlds"]) == (3, [2, 2, 2, 2])
    assert result["weights_sha256"] == undisturbed["weights_sha256"]


@needs_webdataset
def test_a_tar_file_that_is_truncated_is_named(tmp_path: Path) -> None:
    spec = spec_from_file_location("streaming_example", STREAMING)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    example.make_shards(tmp_path)
    shards = sorted(tmp_path.glob("*.tar"))
    counted = el.ShardedStream(shards, open=example.read_tar, lengths=tmp_path / "shards.json")
    assert sum(counted.lengths) == 1797
    assert sorted(counted[1234]) == ["__key__", "__url__", "cls", "image.npy"]
    told = el.ShardedStream(shards, open=example.read_tar, lengths=counted.lengths, buffer=1)
    whole = shards[2].read_bytes()
    counted._readers.clear()
    for size in (len(whole) // 2, len(whole) // 1024 // 2 * 512, 100, 0):
        shards[2].write_bytes(whole[:size])
        with pytest.raises(UsageError, match=f"shard 'digits-002.tar' has {size} bytes, and had {len(whole)} when"):
            counted[599]
        with pytest.raises((UsageError, tarfile.ReadError)) as caught:
            told[599]
        assert "digits-002.tar" in "".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.slow  # test_streams has the same without workers
@needs_webdataset
def test_a_truncated_shard_ends_the_run_and_is_named(job: Job) -> None:
    shards = job.directory / "shards"
    run_script(str(STREAMING), str(shards), "--make")
    (shards / "digits-004.tar").write_bytes((shards / "digits-004.tar").read_bytes()[:-20000])
    command = [str(STREAMING), str(shards), "--loader-workers", "1"]
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(100) == 93, agent.output
    assert "shard 'digits-004.tar' has" in agent.output
    assert "Restore it, or correct lengths=" in agent.output
    (shards / "digits-004.tar").unlink()
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(100) == 93, agent.output
    assert "shard 'digits-004.tar' was counted for" in agent.output
