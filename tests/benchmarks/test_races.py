import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import _memory
from benchmarks._board import Blank, Cell, Row, as_json, blank, chosen, table, verdict
from benchmarks._contestants import CONTESTANTS, Contestant, missing
from benchmarks._memory import MEMORY, Cycled, Peak, launch
from benchmarks._setting import POISON, Count, Hidden, Setting, Tally, value
from benchmarks._trials import TRIALS, Trial
from benchmarks.races import _make_current, board, main, run

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


# The others are of a source whose batches are all in the same memory: they cannot be collected.
COLLECTED = [name for name in TRIALS if not TRIALS[name].beyond]


def setting(wrap: Callable[..., Iterable[Any]], count: int = 8) -> Setting:
    return Setting(wrap, CPU, count=count, side=16)


def contestant(name: str) -> Callable[..., Iterable[Any]]:
    return lambda source, transform: CONTESTANTS[name].wrap(source, CPU, 2, transform)


# -- the trials --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stream", "plain"])
@pytest.mark.parametrize("trial", TRIALS)
def test_who_does_no_wrong_is_found_to_do_none(name: str, trial: str) -> None:
    found = TRIALS[trial].run(setting(contestant(name)))
    assert (found.wrong, found.saw) == (0, "")
    assert found.of == (2 if trial == "accumul." else 8)


def refill(tensors: tuple[Tensor, ...], batch: Iterable[Tensor]) -> tuple[Tensor, ...]:
    for tensor, new in zip(tensors, batch, strict=True):
        tensor.data.copy_(new)  # autograd does not notice, as it does not on a stream
    return tensors


def one_buffer(source: Iterable[Any], _transform: Any) -> Iterator[Any]:
    """Hands out the same memory for every batch."""
    held: tuple[Tensor, ...] | None = None
    for batch in source:
        held = tuple(map(torch.clone, batch)) if held is None else refill(held, batch)
        yield held


def swapped(source: Iterable[Any], transform: Any) -> Iterator[Any]:
    """Hands out two batches in each other's place."""
    batches = list(contestant("plain")(source, transform))
    batches[2], batches[5] = batches[5], batches[2]
    yield from batches


def spoilt(source: Iterable[Any], transform: Any) -> Iterator[Any]:
    """One element of one label is wrong."""
    for number, batch in enumerate(contestant("plain")(source, transform)):
        tensors = list(batch.ask()) if isinstance(batch, Hidden) else list(batch)
        tensors = list(map(torch.clone, tensors))
        if number == 3:
            tensors[0][-1, -1, -1, 0] = 255
        yield Hidden(*tensors) if isinstance(batch, Hidden) else tensors


def lacking(source: Iterable[Any], transform: Any) -> Iterator[Any]:
    """The last batch never comes."""
    batches = list(contestant("plain")(source, transform))
    yield from batches[:-1]


@pytest.mark.parametrize(("trial", "wrong"), [("kept", 7), ("views", 7), ("accumul.", 2)])
def test_reused_memory_is_caught_where_batches_are_kept(trial: str, wrong: int) -> None:
    assert TRIALS[trial].run(setting(one_buffer)).wrong == wrong


@pytest.mark.parametrize("trial", COLLECTED)
def test_batches_in_each_others_place_are_two_wrong_ones(trial: str) -> None:
    assert TRIALS[trial].run(setting(swapped)).wrong == 2


@pytest.mark.parametrize("trial", TRIALS)
def test_one_wrong_element_is_one_wrong_batch(trial: str) -> None:
    assert TRIALS[trial].run(setting(spoilt)).wrong == 1


@pytest.mark.parametrize("trial", COLLECTED)
def test_a_batch_that_never_comes_is_a_wrong_one(trial: str) -> None:
    found = TRIALS[trial].run(setting(lacking))
    assert found.wrong == 1
    assert found.saw == "1 never came"


def test_a_source_that_refills_its_memory_is_caught_when_read_too_late() -> None:
    def hoards(source: Iterable[Any], _transform: Any) -> Iterator[Any]:
        yield from list(source)

    assert TRIALS["refilled"].run(setting(hoards)).wrong == 7


def test_poison_is_no_batch_s_value_nor_what_fresh_memory_holds() -> None:
    assert {0, POISON}.isdisjoint(map(value, range(1000)))


def test_the_batch_that_is_looked_at_next_is_the_one_after_all_that_were() -> None:
    tally = Tally(CPU)
    assert tally.due == 0
    tally.look(torch.zeros(2))
    assert tally.due == 1


def test_nan_is_wrong_too() -> None:
    tally = Tally(CPU)
    tally.look(torch.full((3,), torch.nan), torch.ones(2))
    assert tally.count(1) == Count(1, 1, "3 elements of batch 0")


def test_only_a_few_wrong_batches_are_told_of_and_those_too_many_are_wrong() -> None:
    tally = Tally(CPU)
    for _ in range(6):
        tally.look(torch.zeros(2))
    assert tally.count(5).wrong == 6
    assert tally.count(5).saw.endswith("2 elements of batch 2, ...")


def test_the_trials_run_a_transform_only_where_they_say_so() -> None:
    seen: set[str] = set()
    for name, trial in TRIALS.items():

        def wrap(source: Any, transform: Any, name: str = name) -> Any:
            seen.update([name] if transform is not None else [])
            return contestant("plain")(source, transform)

        trial.run(setting(wrap))
    assert seen == {name for name, trial in TRIALS.items() if trial.needs == "transform"}


@pytest.mark.parametrize("trial", MEMORY)
def test_memory_trials_run_on_the_cpu_and_measure_nothing(trial: str) -> None:
    found = MEMORY[trial].run(setting(contestant("stream"), count=4))
    assert (found.batches, found.unit) == (0, 4 * 3 * 16 * 16 + 4 * 8)


@pytest.mark.parametrize("trial", MEMORY)
def test_memory_is_told_in_the_sources_batches_whatever_is_made_of_them(
    trial: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two contestants that need as much memory are to be told the same."""
    monkeypatch.setattr(_memory, "_active", lambda _, when: 31_000 if when == "peak" else 0)

    def wider(source: Iterable[Any], transform: Any) -> Iterator[Any]:
        plain = contestant("plain")(source, transform)
        return ((images.float(), labels) for images, labels in plain)

    same, wide = (
        MEMORY[trial].run(setting(wrap, count=4)) for wrap in (contestant("plain"), wider)
    )
    assert same == wide
    assert same.batches == (0 if trial == "grown" else 31_000 / 3104)


def test_a_loop_that_only_launches_steps_over_every_batch() -> None:
    steps: list[int] = []
    batches = Cycled([[torch.zeros(1)], [torch.ones(1)]], 5)
    assert launch(CPU, batches, lambda batch: steps.append(int(batch[0]))) == 0
    assert steps == [0, 1, 0, 1, 0]
    assert batches.unit == 4
    assert len(batches) == len(list(batches)) == 5


# -- who runs what -----------------------------------------------------------------------------


def test_without_cuda_only_what_needs_no_stream_runs() -> None:
    found = {name: missing(contestant, CPU) for name, contestant in CONTESTANTS.items()}
    assert {name for name, reason in found.items() if reason is None} == {"stream", "plain"}
    assert {*found.values()} == {None, "needs a CUDA device"}


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Contestant(CONTESTANTS["plain"].wrap, "", packages={"no_such.module": "no-such"})
    assert missing(peer, CUDA) == "not installed: pip install no-such"
    monkeypatch.setitem(sys.modules, "no_such", types.ModuleType("no_such"))
    monkeypatch.setitem(sys.modules, "no_such.module", types.ModuleType("no_such.module"))
    assert missing(peer, CUDA) is None


def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Contestant(CONTESTANTS["plain"].wrap, "", packages={"no_such": "no-such"})
    monkeypatch.setitem(sys.modules, "no_such", None)  # as `import` takes it: not to be had
    assert missing(peer, CUDA) == "not installed: pip install no-such"

    def lack(name: str) -> Any:
        raise ModuleNotFoundError(name, name="pkg_resources")

    monkeypatch.setattr(importlib, "import_module", lack)
    assert missing(peer, CUDA) == 'not installed: pip install "setuptools<82"'

    def fail(name: str) -> Any:
        raise OSError(f"{name}: libcuda.so.1 is missing")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert missing(peer, CUDA) == "cannot be imported: no_such: libcuda.so.1 is missing"


def test_what_a_contestant_lacks_is_no_result_and_no_fault() -> None:
    timm = CONTESTANTS["timm"]
    assert blank(timm, TRIALS["early"], None) == Blank("n/a", "it only normalises")
    assert blank(timm, TRIALS["late"], None) is None
    assert blank(timm, TRIALS["late"], "not there") == Blank("absent", "not there")
    lacks = {reason for contestant in CONTESTANTS.values() for reason in contestant.lacks}
    assert lacks <= {trial.needs for trial in TRIALS.values()}


def test_what_its_documentation_excludes_is_a_trial_that_it_runs() -> None:
    for name, contestant in CONTESTANTS.items():
        assert contestant.beyond.keys() <= TRIALS.keys()
        assert all(blank(contestant, TRIALS[trial], None) is None for trial in contestant.beyond)
        assert name != "stream" or not contestant.beyond


def test_only_picks_contestants_and_trials() -> None:
    assert chosen([], ["a", "b"], ["x", "y"]) == (["a", "b"], ["x", "y"])
    assert chosen(["b"], ["a", "b"], ["x", "y"]) == (["b"], ["x", "y"])
    assert chosen(["y", "b"], ["a", "b"], ["x", "y"]) == (["b"], ["y"])
    with pytest.raises(ValueError, match=r"^only must name contestants or trials, got z: .*a.*x"):
        chosen(["z", "a"], ["a"], ["x"])


def test_every_name_can_be_given_to_only() -> None:
    assert not any(" " in name or "," in name for name in (*CONTESTANTS, *TRIALS, *MEMORY))
    assert not CONTESTANTS.keys() & (TRIALS | MEMORY).keys()


# -- the board ---------------------------------------------------------------------------------


def rows() -> list[Row]:
    good: dict[str, Cell] = {
        "late": Count(0, 40),
        "refilled": Count(39, 40),
        "peak": Peak(3.96, 1 << 24, "text"),
    }
    bad: dict[str, Cell] = {
        "late": Count(37, 40, "5 elements"),
        "refilled": Count(0, 40),
        "peak": Peak(44.0, 9),
    }
    torn: dict[str, Cell] = {
        "late": Blank("raised", "E: x"),
        "refilled": Blank("n/a", "why"),
        "peak": Peak(1.0, 9),
    }
    absent: dict[str, Cell] = dict.fromkeys(good, Blank("absent", "not installed: pip install d"))
    return [
        Row("a", "as is", "", 2, good),
        Row("b", "by its docstring", "b 1.0", 1, bad),
        Row("c", "so", "", 1, torn),
        Row("d", "so", "", 1, absent),
    ]


def test_a_verdict_counts_wrong_batches_but_for_what_nobody_promises() -> None:
    assert [verdict(row) for row in rows()] == [
        "no batch wrong",
        "37 of 40 batches wrong",
        "1 raised",
        "not installed: pip install d",
    ]


def test_a_verdict_leaves_out_what_the_contestants_own_documentation_excludes() -> None:
    cells: dict[str, Cell] = {"late": Count(0, 40), "switched": Count(38, 40)}
    assert verdict(Row("e", "so", "", 1, cells)) == "38 of 80 batches wrong"
    row = Row("e", "so", "", 1, cells, {"switched": "one stream", "side": "none"})
    assert verdict(row) == "no batch wrong"
    (data,) = as_json([row])
    assert data["beyond"] == row.beyond
    assert data["trials"]["switched"]["wrong"] == 38
    lines = table([row], {name: TRIALS[name] for name in cells})
    assert lines[1].split() == ["e", "1", "0/40", "38/40*", "no", "batch", "wrong"]
    note = lines.index("Beyond what its own documentation promises (*), and not in its verdict:")
    assert lines[note + 1] == "  e: switched: one stream"
    assert "none" not in "".join(lines)  # of a trial that was not asked for
    missing = Row("e", "so", "", 1, {"switched": Blank("absent", "not there")}, row.beyond)
    assert verdict(missing) == "not there"


def test_the_table_shows_every_cell_and_says_what_needs_words() -> None:
    trials = {name: (TRIALS | MEMORY)[name] for name in ("late", "refilled", "peak")}
    lines = table(rows(), trials)
    assert lines[0].split() == ["ahead", "late", "refilled", "peak", "verdict"]
    assert lines[1].split() == ["a", "2", "0/40", "39/40", "4.0", "no", "batch", "wrong"]
    assert lines[2].split()[:5] == ["b", "1", "37/40", "0/40", "44.0"]
    assert lines[3].split()[:5] == ["c", "1", "raised", "n/a", "1.0"]
    text = "\n".join(lines)
    assert "by its docstring (b 1.0)" in text
    assert "c: raised: E: x (late)" in text
    assert "c: n/a: why (refilled)" in text
    assert "d: absent" not in text


def test_json_says_of_each_cell_what_it_is() -> None:
    first, *_, last = as_json(rows())
    assert first["trials"]["late"] == {"kind": "count", "wrong": 0, "of": 40, "saw": ""}
    assert first["trials"]["peak"]["batches"] == 3.96
    assert last["trials"]["late"]["kind"] == "blank"


def test_one_that_raises_is_a_cell_that_says_what() -> None:
    def fail(_setting: Setting) -> Count:
        raise TypeError("no such thing. And more")

    found = run(CONTESTANTS["plain"], Trial(fail), setting(contestant("plain")))
    assert found == Blank("raised", "TypeError: no such thing")


@pytest.mark.slow
def test_the_board_runs_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    file = tmp_path / "board.json"
    main(["--device", "cpu", "--quick", "--only", "stream,timm,late,peak", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "the CPU: no races" in printed
    assert "stream      2    0/12     0.0  no batch wrong" in printed
    assert '"kind": "count"' in file.read_text()
    (row,) = board(["plain"], ["early", "opaque"], CPU, 2, 4)
    assert verdict(row) == "no batch wrong"


def test_the_device_that_is_asked_for_is_made_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.set_device", made.append)
    monkeypatch.setenv("LOCAL_RANK", "7")
    _make_current(CPU)
    assert (made, os.environ["LOCAL_RANK"]) == ([], "7")
    _make_current(torch.device("cuda", 1))
    assert (made, os.environ["LOCAL_RANK"]) == ([torch.device("cuda", 1)], "1")


def test_without_a_cuda_device_it_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "device must be CUDA, got no CUDA device: run this on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"), [("mps", "device must be CUDA, got mps"), ("cpu --only z", "only must name")]
)
def test_wrong_arguments_are_named(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--device", *given.split()])
    assert said in capsys.readouterr().err
