"""The comparison with cuDNN: what it times, and what it says without a GPU."""

import pytest
from yolomlir.tools.conv_against_cudnn import Row, convolutions, main, report

from yolomlir.compiler import CompileOptions, emit
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.runtime.device import cuda_device


def test_every_convolution_kernel_is_found() -> None:
    options = CompileOptions(target="sm_90", height=64, width=96, level=2)
    found = convolutions(emit(seeded_checkpoint("n", 80, 0), options, "optimized"))
    first = found["conv2d_3x3s2_3x64x96_16_silu"]
    assert (first.channels, first.height, first.width, first.out_channels) == (3, 64, 96, 16)
    assert (first.kernel, first.strides, first.padding) == ((3, 3), (2, 2), (1, 1, 1, 1))
    assert {c.groups for c in found.values()} == {1, 64, 80, 128, 256}


def test_report_adds_up_over_launches() -> None:
    text = report([Row("a", 2, 2.0, 3.0), Row("b", 1, 5.0, 4.0)])
    assert "sum over launches: ours 9.0 us, cuDNN 10.0 us" in text
    assert "slower than cuDNN: 1 of 2 kernels" in text


@pytest.mark.skipif(not isinstance(cuda_device(), str), reason="a GPU is here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seeded:n"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
