"""vLLM's CPU worker, with the repairs that seeds and adapters need (the latter: :mod:`tangram.cpu_lora`).

A step that ends inside a prompt samples a token too, which vLLM throws away and then moves the request's
seeded generator back by one use. It does so by the generator's offset, which CPU generators do not have: the
engine would die of any seeded prompt that is cut. Stock vLLM cuts a prompt when the step's token budget ends;
the ragged cache does at every seal boundary. So here the generator's whole state is kept and put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from tangram.cpu_lora import repair
from tangram.reasons import told
from tangram.support import check_supported


class SeedKeepingRunner(CPUModelRunner):
    """A model runner whose discarded samples leave seeded generators as they were, and whose requests without
    an adapter stay without one."""

    def _unfinished(self) -> list[int]:
        """Requests of the batch whose sample is discarded and that have a generator of their own."""
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return [int(i) for i in np.nonzero(mask)[0] if int(i) in self.input_batch.generators]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        states = {index: generators[index].get_state() for index in self._unfinished()}
        output = super()._sample(*args, **kwargs)
        for index, state in states.items():
            generators[index].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        with self._hidden(self._unfinished()):
            return super()._bookkeeping_sync(*args, **kwargs)

    def load_lora_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().load_lora_model(*args, **kwargs)
        repair(self.lora_manager)
        return model

    @contextmanager
    def _hidden(self, indices: list[int]) -> Iterator[None]:
        """Keep vLLM from moving these generators: they stand where they should."""
        generators = self.input_batch.generators
        hidden = {index: generators.pop(index) for index in indices}
        try:
            yield
        finally:
            generators.update(hidden)


class TangramCPUWorker(CPUWorker):
    """Uses :class:`SeedKeepingRunner`."""

    def init_device(self) -> None:
        """As vLLM's. The runner, just built and without a model, only changes its methods. What cannot be
        served is refused here already: a model whose layers are not ours would be loaded first."""
        with told():
            check_supported(self.vllm_config)
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:
            self.model_runner.__class__ = SeedKeepingRunner
