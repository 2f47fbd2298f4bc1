"""What all tests share: the markers' meaning, and `--no-skips`."""

import os
from collections.abc import Generator

import hypothesis
import pytest
import torch

# Triton decides when it is imported: its kernels run interpreted on a machine without a GPU.
if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# An example's time says how busy the machine is; pytest-timeout catches what hangs.
hypothesis.settings.register_profile("streamloader", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("streamloader")

ACCELERATORS_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a skipped test fails: for a machine that is meant to have what every test needs",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = torch.accelerator.device_count()
    for marker, needed in ACCELERATORS_NEEDED.items():
        if item.get_closest_marker(marker) and found < needed:
            pytest.skip(f"needs {needed} accelerator(s), and torch finds {found}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure is reported as skipped too; it ran.
    if not hasattr(report, "wasxfail"):
        _fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield  # skipped here: a whole module, by importorskip for one
    _fail_if_skipped(report, collector.config)
    return report


def _fail_if_skipped(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> None:
    if report.skipped and config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason} (a failure, because of --no-skips)"
