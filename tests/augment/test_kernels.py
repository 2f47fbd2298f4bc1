"""What Triton makes of the kernel for a GPU, without one: it is compiled, not run."""

import os
import re
import subprocess
import sys

import pytest

COMPILED = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from streamloader.augment import fused, kernels

rows, columns = fused.TILE
constants = dict(
    STEP={step}, CHANNELS=3, RAGGED=False, WIDE=False, UNIT=255.0, VIEW={view}, SIZE=8,
    MODE="bilinear", ANTIALIAS=True, CLAMP=False, OPS=((2, 1),), STOP=-1, STORE=True, LEVELS=False,
    BLOCK_Y=rows, BLOCK_X=columns, stride_x={stride_x}, out_c=1,
)
pointers = dict(source="*u8", places="*i64", table="*fp32", constants="*fp32", out="*bf16",
                sums="*fp32")
names = list(inspect.signature(kernels.carry_out.fn).parameters)
signature = {{
    name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
}}
aligned = [name for name in names if name in pointers] + ["stride_y", "out_n", "out_y", "out_x"]
aligned = [(names.index(name),) for name in [*aligned, "stride_c"]]
attributes = {{place: [["tt.divisibility", 16]] for place in aligned}}
source = ASTSource(kernels.carry_out, signature, constexprs=constants, attrs=attributes)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=fused.WARPS))
print(made.asm["ttgir"], made.asm["ptx"])
"""


def compiled(**constants: int) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [sys.executable, "-c", COMPILED.format(**constants)]
    return subprocess.run(
        arguments, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize(("view", "stride_x"), [(0, 16), (-1, 1)])
def test_threads_take_neighbours_in_a_row_and_each_its_own_value(view: int, stride_x: int) -> None:
    made = compiled(step=0, view=view, stride_x=stride_x)
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked.*)$", made, re.MULTILINE))
    used = re.findall(r"tt\.(load|store) .*: tensor<\d+x\d+x!tt\.ptr<\w+>, (#\w+)>", made)
    assert [kind for kind, _ in used] == ["load"] * 3 + ["store"] * 3
    for _, layout in used:
        assert "sizePerThread = [1, 1], threadsPerWarp = [1, 32]" in layouts[layout]
    loads, stores = re.findall(r"ld\.global\.b8 ", made), re.findall(r"st\.global\.b16 ", made)
    assert len(loads) == len(stores) > 0
    assert "global.v" not in made
