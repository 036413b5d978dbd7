"""Which changes between two runs count as worse."""

import json

import pytest

from tests.gpu.compare import main, read

OLD = [
    {"stage": "target", "cell": "1 x 5", "pass_ms": 7.0, "gb_per_s": 2000, "kernels": 461},
    {"stage": "flips", "arm": "batch 8", "different": 0, "parted_at": {}},
    {"stage": "kernels", "product": "head", "us_5": 1.0, "ours_us": [47.0, 49.0], "ours_different": [0, 0]},
    {"stage": "target", "seconds": 20.0, "exit": 0, "log": []},
]


def run(monkeypatch, capsys, tmp_path, new):
    paths = [tmp_path / name for name in ("old.jsonl", "new.jsonl")]
    for path, readings in zip(paths, (OLD, new), strict=True):
        path.write_text("".join(json.dumps(reading) + "\n" for reading in readings))
    assert len(read(paths[0])) == len(OLD)
    monkeypatch.setattr("sys.argv", ["compare", *map(str, paths)])
    with pytest.raises(SystemExit) as end:
        main()
    lines = capsys.readouterr().out.splitlines()
    worse = [line.removeprefix("WORSE  ") for line in lines if line.startswith("WORSE")]
    assert bool(end.value.code) == bool(worse)
    return worse


def changed(nth, **fields):
    return [reading | fields if i == nth else reading for i, reading in enumerate(OLD)]


@pytest.mark.parametrize(
    ("new", "worse"),
    [
        (OLD, []),
        (changed(0, pass_ms=7.6, gb_per_s=1850, kernels=500), []),
        (changed(0, pass_ms=8.0), ["target, 1 x 5: pass_ms 7.0 -> 8.0 (1.14)"]),
        (changed(0, gb_per_s=1700), ["target, 1 x 5: gb_per_s 2000 -> 1700 (0.85)"]),
        (changed(1, different=1), ["flips, batch 8: different 0 -> 1"]),
        (changed(2, ours_us=[47.0, 60.0]), ["kernels, head: ours_us [47.0, 49.0] -> [47.0, 60.0] (1.22)"]),
        (changed(2, ours_different=[0, 3]), ["kernels, head: ours_different [0, 0] -> [0, 3]"]),
        (OLD[1:], ["target, 1 x 5: not measured any more"]),
    ],
)
def test_slower_passes_and_any_change_of_bits_are_worse(new, worse, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, capsys, tmp_path, new) == worse
