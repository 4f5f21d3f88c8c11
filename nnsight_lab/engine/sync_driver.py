"""vLLM's LLM, stepped on a thread of its own.

Stepping it ourselves, instead of calling ``LLM.generate``, is what makes an interrupt immediate and
clean: stock vLLM sits in a queue read for seconds, keeps the interrupted requests queued, and hands
*their* outputs to the next call. It also lets several callers share one engine, and shows tokens
while they come.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.driver import Driver, records, take
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.wire.keys import COLLECT, FREE, PEEK


class SyncDriver(Driver):
    """Drives ``LLM``."""

    def __init__(self) -> None:
        super().__init__()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nnsight-lab-engine")
        self._llm: Any = None
        self._engine: Any = None
        #: vLLM's id of each running request -> where its output belongs.
        self._running: dict[str, tuple[Call, int]] = {}
        self._calls: dict[int, Call] = {}
        self._thread.start()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            busy = bool(self._running)
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                return
            command()
            del command  # it holds a call, and the call its saves, until the next one comes

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # handed to whoever waits
                future.set_exception(error)

        self._commands.put(run)
        return future

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._fail(error)
            return
        finished: list[LabRequest] = []
        touched: dict[int, Call] = {}
        for output in outputs:
            call, index = self._running.get(output.request_id, (None, 0))
            if call is None:
                continue
            call.took(index, output)
            if call.peeks is not None and not index and not output.finished and call.peeks.due():
                self._peek(call.peeks, call.requests[0])
            if output.finished:
                self.finished(output)
                del self._running[output.request_id]
                finished.append(call.requests[index])
                touched[id(call)] = call
        try:
            self._collect([r for r in finished if r.has_blocks])
        except Exception as error:
            self._fail(error)
            return
        for call in touched.values():
            self._settle(call)

    def _peek(self, peeks: Peeks, request: LabRequest) -> None:
        try:
            peeks.took(self._engine.collective_rpc(PEEK, args=(peeks.question(request.id),)))
        except Exception:  # the next step says what became of the engine
            peeks.over()

    def _settle(self, call: Call) -> None:
        if not any(request.id in self._running for request in call.requests):
            self._calls.pop(id(call), None)
            call.resolve()

    def _collect(self, requests: list[LabRequest]) -> None:
        if requests:
            began, opened = time.perf_counter(), self.home.opened_bytes
            ids = [request.id for request in requests]
            returned = self.home.returned()
            payloads = self._engine.collective_rpc(COLLECT, args=(ids, records(requests), returned))
            take(requests, payloads, self.home, self.steps, late=self.late_saves)
            self.came_home(began, opened)

    def _fail(self, error: Exception) -> None:
        """The engine failed under every running call."""
        calls, self._calls = list(self._calls.values()), {}
        self._running.clear()
        for call in calls:
            call.resolve(error)

    # -- calls ---------------------------------------------------------------------------------

    def start(self, model: str, options: dict[str, Any]) -> Future[None]:
        def build() -> None:
            from nnsight_lab.engine.model import LabVLLM  # nnsight and vLLM: seconds to import

            self.model = LabVLLM(model, dispatch=True, mode="sync", launch=self.launch, **options)
            self._llm = self.model.vllm_entrypoint
            self._engine = self._llm.llm_engine

        return self._do(build)

    def submit(self, call: Call) -> None:
        self._commands.put(lambda: self._begin(call))

    def _begin(self, call: Call) -> None:
        from vllm.sampling_params import RequestOutputKind

        if call.aborted.is_set():
            call.resolve()
            return
        self._calls[id(call)] = call
        try:
            for index, request in enumerate(call.requests):
                kind = RequestOutputKind.CUMULATIVE if call.live else RequestOutputKind.FINAL_ONLY
                request.params.output_kind = kind
                self._running[request.id] = (call, index)
                self._engine.add_request(
                    request.id, request.prompt, request.params, lora_request=request.lora_request
                )
        except Exception as error:  # a prompt vLLM refuses: none of the call runs
            with contextlib.suppress(Exception):
                self._drop(call)
            call.resolve(error)
            return
        if not call.requests:
            self._settle(call)

    def _drop(self, call: Call) -> None:
        """Abort what still runs of a call, and free what its blocks held."""
        self._calls.pop(id(call), None)
        left = [request.id for request in call.requests if request.id in self._running]
        for request_id in left:
            del self._running[request_id]
        if left and not self.dead():
            self._engine.abort_request(left, internal=False)
            if any(request.has_blocks for request in call.requests):
                self._engine.collective_rpc(FREE, args=(left,))

    def abort(self, call: Call) -> Future[None]:
        call.aborted.set()

        def drop() -> None:
            self._drop(call)
            call.resolve()

        return self._do(drop)

    def rpc(self, method: str, *args: Any) -> Future[list[Any]]:
        return self._do(lambda: self._engine.collective_rpc(method, args=args))

    def sleep(self) -> Future[None]:
        return self._do(lambda: self._engine.sleep(level=1))

    def wake(self) -> Future[None]:
        return self._do(lambda: self._engine.wake_up())

    # -- life ----------------------------------------------------------------------------------

    def dead(self) -> bool:
        engine = self._engine
        return engine is not None and bool(engine.engine_core.resources.engine_dead)

    def release(self) -> None:
        """Free the thread from a queue that a killed EngineCore will never fill."""
        from vllm.v1.engine.exceptions import EngineDeadError

        outputs = getattr(self._engine.engine_core, "outputs_queue", None)
        if outputs is not None:
            outputs.put_nowait(EngineDeadError())

    @property
    def running(self) -> bool:
        return self._engine is not None

    def processor(self) -> Any:
        return None if self._engine is None else self._engine.output_processor

    def unfinished(self) -> int:
        return len(self._running)

    def stop(self) -> None:
        if self._engine is not None:
            if self.dead():
                self.release()
            with contextlib.suppress(Exception):
                self._do(self._engine.engine_core.shutdown).result(timeout=20)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=5)
