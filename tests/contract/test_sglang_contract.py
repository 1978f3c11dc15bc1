"""The real SGLang passes the contract, on the CPU, with hsx's plugin in it and two data-parallel ranks.

The interpreter of its environment is HSX_SGLANG_PYTHON, by default what `make setup` builds. Without one the suite is
skipped, except in CI, where that is a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.testing.capture_server import CPU_VARIABLES, RANKS_VARIABLES, START_S, CaptureServer
from hsx.testing.engine_contract import EngineContract, Served
from hsx.testing.reference_model import ReferenceModel
from hsx.testing.servers import running
from hsx.testing.sglang_job import interpreter
from hsx.testing.tiny_models import make

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 128
CONTEXT = 2048

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the whole suite."""
    python, folder = interpreter(), tmp_path_factory.mktemp("sglang")
    model = make("llama", folder / "model")
    arguments = ["--context-length", str(CONTEXT), "--dp-size", "2"]
    capture = CaptureServer(python, folder, model, (1, 4, 7), arguments=arguments)
    variables = {**CPU_VARIABLES, **RANKS_VARIABLES}
    with running(capture.command(), folder / "dumps", capture.epoch, capture.port, variables, START_S) as server:
        yield Served(server, ReferenceModel(model), CHUNK)


class TestSGLangContract(EngineContract):
    """The shared suite."""

    def long_tokens(self, served: Served) -> int:
        """The context is cut down on the command line, below the model's own."""
        return CONTEXT - 8
