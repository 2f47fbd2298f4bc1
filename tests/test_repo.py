"""What holds for the repository as a whole."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import streamloader

ROOT = Path(__file__).parents[1]

# Where a module's test is not tests/<same path>/test_<same name>.py: the first needs a GPU.
TESTED_ELSEWHERE = {
    "device/accelerator.py": "gpu/test_accelerator.py",
    # Triton's: by what runs them.
    "augment/kernels.py": "augment/test_fused.py",
    "augment/kernel_ops.py": "augment/test_fused.py",
    "augment/kernel_views.py": "augment/test_fused.py",
}

# Each is needed for one feature, and imported when that is used.
OPTIONAL = {"PIL", "matplotlib", "torchcodec", "torchvision", "triton", "webdataset"}


# -- every module has a test file of its name --------------------------------------------------


def untested(package: Path, tests: Path) -> list[str]:
    """The test files that `package` asks for and `tests` lacks."""
    modules = [path.relative_to(package) for path in package.rglob("*.py")]
    wanted = [
        TESTED_ELSEWHERE.get(path.as_posix(), (path.parent / f"test_{path.name}").as_posix())
        for path in modules
        if path.name != "__init__.py"
    ]
    return sorted(name for name in wanted if not (tests / name).exists())


def test_every_module_has_a_test_file_of_its_name() -> None:
    assert untested(ROOT / "streamloader", ROOT / "tests") == []


def test_a_module_without_a_test_file_is_found(tmp_path: Path) -> None:
    package, tests = tmp_path / "package", tmp_path / "tests"
    for name in ("__init__.py", "tree.py", "device/cpu.py", "device/accelerator.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (tests / "device").mkdir(parents=True)
    (tests / "device/test_cpu.py").touch()

    assert untested(package, tests) == ["gpu/test_accelerator.py", "test_tree.py"]


# -- a GPU test runs where GPU tests are run ---------------------------------------------------


def misplaced(tests: Path) -> list[str]:
    """The files that use the GPU markers outside of `gpu/`, or do not inside of it."""
    files = [path.relative_to(tests) for path in tests.rglob("test_*.py")]
    return sorted(
        path.as_posix()
        for path in files
        if (path.parts[0] == "gpu")
        != bool(re.search(r"\bmark\.(multi_)?gpu\b", (tests / path).read_text(encoding="utf-8")))
    )


def test_every_gpu_test_is_where_scripts_test_gpu_looks() -> None:
    assert misplaced(ROOT / "tests") == []


def test_a_misplaced_gpu_test_is_found(tmp_path: Path) -> None:
    marked = "pytestmark = pytest.mark." + "gpu"
    (tmp_path / "gpu").mkdir()
    for name, text in [
        ("gpu/test_right.py", marked),
        ("gpu/test_wrong.py", ""),
        ("test_right.py", ""),
        ("test_wrong.py", marked),
    ]:
        (tmp_path / name).write_text(text)

    assert misplaced(tmp_path) == ["gpu/test_wrong.py", "test_wrong.py"]


# -- the code in the README and the docs runs, and their links lead somewhere ------------------


def code_blocks(markdown: str) -> dict[str, str]:
    """The Python blocks of `markdown`, by the line that each starts on.

    A block that follows `<!-- no-test -->` is left out. The code is padded with empty lines, so
    that a traceback gives the line in the document.
    """
    pattern = r"(<!-- no-test -->\s*)?^```python\n(.*?)^```$"
    blocks = {}
    for match in re.finditer(pattern, markdown, re.MULTILINE | re.DOTALL):
        skipped, code = match.groups()
        if skipped is None:
            lines_before = markdown.count("\n", 0, match.start(2))
            blocks[f"line {lines_before + 1}"] = "\n" * lines_before + code
    return blocks


README = ROOT / "README.md"
BLOCKS = code_blocks(README.read_text(encoding="utf-8")) if README.exists() else {}
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_readme_shows_code() -> None:
    assert BLOCKS, "README.md has no ```python block that is tested"


def reader() -> dict[str, Any]:
    """What the reader has, and the blocks use without defining it.

    Each of the README's blocks is run on its own, a docs page's one after the other, with these
    names:
        torch: Imported, as by whoever has a `DataLoader`.
        dataloader: A `DataLoader` of uint8 images, (8, 3, 8, 8), and int64 labels: two batches.
        train_step: Takes images and labels, and does nothing.
    """
    images = torch.arange(16 * 3 * 8 * 8).remainder(256).to(torch.uint8).view(16, 3, 8, 8)
    dataset = TensorDataset(images, torch.arange(16))
    return {
        "__name__": "readme",
        "torch": torch,
        "dataloader": DataLoader(dataset, batch_size=8),
        "train_step": lambda _images, _labels: None,
    }


@pytest.mark.parametrize("code", BLOCKS.values(), ids=BLOCKS.keys())
def test_the_readmes_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), reader())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_docs_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks, names = code_blocks(page.read_text(encoding="utf-8")), reader()
    assert blocks
    for code in blocks.values():
        exec(compile(code, str(page), "exec"), names)


def lost(page: Path) -> list[str]:
    """The links and pictures of a page that lead to no file."""
    found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert lost(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#b) ![c](d.png) [e](https://f.g/h) [i](#j) [`k`](l/m.py)")
    assert lost(page) == ["d.png", "l/m.py"]


def test_code_blocks_leaves_out_the_marked_and_keeps_line_numbers() -> None:
    markdown = (
        "Text\n```python\na = 1\n```\n"
        "<!-- no-test -->\n```python\nb = 2\n```\n"
        "```console\nc\n```\n```python\nd = 4\n```\n"
    )
    assert code_blocks(markdown) == {
        "line 3": "\n\na = 1\n",
        "line 13": "\n" * 12 + "d = 4\n",
    }


# -- importing the package is cheap ------------------------------------------------------------


def modules_added_by(statement: str) -> set[str]:
    """The top-level modules that `statement` loads in a fresh process, beyond those of torch."""
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    # The working directory is first on the path of a program given by -c: the tree at hand.
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_streamloader_imports_no_optional_dependency() -> None:
    added = modules_added_by("import streamloader")
    assert "streamloader" in added
    assert added & OPTIONAL == set()


@pytest.mark.slow
def test_an_optional_dependency_that_is_imported_is_found() -> None:
    assert "webdataset" in modules_added_by("import webdataset") & OPTIONAL


# -- the public names --------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert streamloader.__all__ == ["Counts", "Planned", "Stage", "Stats", "StreamLoader", "on"]
    assert all(hasattr(streamloader, name) for name in streamloader.__all__)


# -- the table of cases names tests that exist --------------------------------------------------

GROUPS = {"A": 6, "B": 4, "C": 7, "D": 7, "E": 10, "F": 4, "G": 3}
"""How many cases there are in each group that is complete. E09 was left out from the start."""

CASES = [f"{group}{n:02}" for group, count in GROUPS.items() for n in range(1, count + 1)]
CASES.remove("E09")


def named_tests(folder: Path) -> dict[str, set[str]]:
    """The tests below `folder`: for each name the files that have it."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, set()).add(path.relative_to(folder).as_posix())
    return found


def wrong_in_table(table: str, tests: dict[str, set[str]], cases: list[str]) -> list[str]:
    """What a table of cases says that is not so, and the cases that it says nothing of."""
    rows = re.findall(r"^\| ([A-Z]\d\d) \| (.*) \|$", table, re.MULTILINE)
    found = [f"{case}: no row" for case in cases if case not in dict(rows)]
    for case, row in rows:
        _, named, *reason = re.split(r" \| ", row)
        listed = re.findall(r"`([^`]+)::(\w+)`", named)
        own = [name for _, name in listed if f"_{case.lower()}_" in name]
        if not own and "does not apply" not in "".join(reason):
            found.append(f"{case}: neither a test of its name nor a reason")
        for file, name in listed:
            if file not in tests.get(name, ()):
                now = ", ".join(sorted(tests.get(name, ()))) or "nowhere"
                found.append(f"{case}: {file} has no {name}, which is {now}")
    reasons = [case for case, row in rows if case in cases and "does not apply" in row]
    if len(reasons) > len(cases) / 10:
        found.append(f"too many do not apply: {reasons}")
    return found


def test_the_table_of_cases_is_true() -> None:
    table = (ROOT / "tests/CASES.md").read_text(encoding="utf-8")
    assert wrong_in_table(table, named_tests(ROOT / "tests"), CASES) == []


def test_a_table_of_cases_that_is_not_true_is_found() -> None:
    table = "\n".join(
        [
            "| id | what | tests | can it fail |",
            "| A01 | moved | `test_x.py::test_a01_x` | yes |",
            "| A02 | gone | `test_x.py::test_a02_gone` | yes |",
            "| A03 | of another | `test_x.py::test_a01_x` | yes |",
            "| A04 | left out |  | does not apply: no such thing here |",
            "| A05 | right | `test_y.py::test_a05_b01_x`<br>`test_y.py::test_other` | yes |",
            "| J01 | of a group without the last column | `test_y.py::test_j01_x` |",
            "| J02 | likewise, without a test |  |",
        ]
    )
    tests = {
        "test_a01_x": {"gpu/test_y.py"},
        "test_a05_b01_x": {"test_y.py"},
        "test_other": {"test_y.py"},
        "test_j01_x": {"test_y.py"},
    }
    assert wrong_in_table(table, tests, ["A01", "A02", "A03", "A04", "A05", "A06"]) == [
        "A06: no row",
        "A01: test_x.py has no test_a01_x, which is gpu/test_y.py",
        "A02: test_x.py has no test_a02_gone, which is nowhere",
        "A03: neither a test of its name nor a reason",
        "A03: test_x.py has no test_a01_x, which is gpu/test_y.py",
        "J02: neither a test of its name nor a reason",
        "too many do not apply: ['A04']",
    ]
