import pytest
import torch

from benchmarks._models import Normalize, eager, model, with_item
from benchmarks._require import require

CPU = torch.device("cpu")


def test_normalize_is_that_of_torchvision_in_channels_last() -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    found = Normalize(CPU, torch.float32)(images)
    torch.testing.assert_close(found, (images / 255 - mean) / std)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_normalize_leaves_its_input_alone() -> None:
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    before = images.clone()
    Normalize(CPU, torch.bfloat16)(images)
    assert torch.equal(images, before)


def test_a_step_changes_the_weights() -> None:
    net = model("small", 8)
    before = [weight.detach().clone() for weight in net.parameters()]
    step = with_item(eager(net, CPU, torch.float32))
    step(torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))
    changed = [not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True)]
    assert any(changed)


def test_a_missing_module_says_what_to_install() -> None:
    with pytest.raises(SystemExit, match=r'no_such_module: pip install "streamloader\[bench\]"$'):
        require("no_such_module")
