"""vLLM's AsyncLLM on an event loop of its own thread.

On the kernel's loop, nnsight's async engine cannot be used from a sync cell, a widget callback or
a subshell, and generation waits whenever a cell computes. On a loop of its own thread all of them
work, and tokens arrive while the kernel is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any

from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.driver import Driver, records, take
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.wire.keys import COLLECT, FREE, PEEK


class LoopDriver(Driver):
    """Drives an ``AsyncLLM`` on the event loop it is given."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._llm: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: Finished requests waiting for the one collect that takes all of this moment's.
        self._finished: list[tuple[LabRequest, asyncio.Future[None]]] = []
        self._peeking: set[asyncio.Task[None]] = set()

    def _schedule(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def submit(self, call: Call) -> None:
        self._loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: Call) -> None:
        if call.aborted.is_set():
            call.resolve()
            return
        task = self._loop.create_task(self._call(call))
        self._tasks[id(call)] = task
        task.add_done_callback(lambda _: self._tasks.pop(id(call), None))

    async def _call(self, call: Call) -> None:
        tasks = [self._loop.create_task(self._request(call, i)) for i in range(len(call.requests))]
        try:
            # The first failure ends the call: a prompt vLLM refuses, or an engine that died.
            await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.resolve(None if isinstance(error, asyncio.CancelledError) else error)
            if not isinstance(error, Exception):
                raise
        else:
            call.resolve()

    def stream(self, request: LabRequest) -> AsyncIterator[Any]:
        """VLLM's outputs of a request."""
        stream: AsyncIterator[Any] = self._llm.generate(
            request.prompt, request.params, request.id, lora_request=request.lora_request
        )
        return stream

    async def _request(self, call: Call, index: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        request = call.requests[index]
        params = request.params
        params.output_kind = RequestOutputKind.CUMULATIVE if call.live else RequestOutputKind.FINAL_ONLY
        collected = False
        try:
            async for output in self.stream(request):
                call.took(index, output)
                if call.peeks is not None and not index and not output.finished and call.peeks.due():
                    # Beside the tokens, which do not wait for it.
                    peeking = self._loop.create_task(self._peek(call.peeks, request))
                    self._peeking.add(peeking)
                    peeking.add_done_callback(self._peeking.discard)
                if output.finished:
                    self.finished(output)
            if request.has_blocks:
                await self.collect(request)
                collected = True
        finally:
            if request.has_blocks and not collected:
                # A cancelled or failed request leaves its blocks in the worker unless told.
                with contextlib.suppress(Exception):
                    await asyncio.shield(self._loop.create_task(self.free([request.id])))

    async def _peek(self, peeks: Peeks, request: LabRequest) -> None:
        try:
            peeks.took(await self._llm.collective_rpc(PEEK, args=(peeks.question(request.id),)))
        except Exception:  # the request itself says what became of the engine
            peeks.over()

    async def collect(self, request: LabRequest) -> None:
        """Join the collect of everything that finished in this turn of the loop: one RPC, not one each."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._finished.append((request, done))
        if len(self._finished) == 1:
            self._loop.call_soon(lambda: self._loop.create_task(self._collect_all()))
        await done

    async def _collect_all(self) -> None:
        batch, self._finished = self._finished, []
        requests = [request for request, _ in batch]
        began, opened = time.perf_counter(), self.home.opened_bytes
        try:
            payloads = await self._llm.collective_rpc(
                COLLECT, args=([r.id for r in requests], records(requests), self.home.returned())
            )
            take(requests, payloads, self.home, self.steps, late=self.late_saves)
            self.came_home(began, opened)
        except BaseException as error:
            for _, done in batch:
                if not done.done():
                    done.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    async def free(self, ids: list[str]) -> None:
        if not self.dead():
            await self._llm.collective_rpc(FREE, args=(ids,))

    def abort(self, call: Call) -> Future[None]:
        call.aborted.set()

        async def cancel() -> None:
            task = self._tasks.get(id(call))
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait({task})

        return self._schedule(cancel())

    def rpc(self, method: str, *args: Any) -> Future[list[Any]]:
        async def call() -> list[Any]:
            result: list[Any] = await self._llm.collective_rpc(method, args=args)
            return result

        return self._schedule(call())

    def sleep(self) -> Future[None]:
        async def sleep() -> None:
            await self._llm.sleep(level=1)

        return self._schedule(sleep())

    def wake(self) -> Future[None]:
        async def wake() -> None:
            await self._llm.wake_up()

        return self._schedule(wake())

    def dead(self) -> bool:
        llm = self._llm
        return llm is not None and bool(llm.errored)

    @property
    def running(self) -> bool:
        return self._llm is not None

    def processor(self) -> Any:
        return None if self._llm is None else self._llm.output_processor

    def unfinished(self) -> int:
        return 0 if self._llm is None else int(self._llm.output_processor.get_num_unfinished_requests())


class AsyncDriver(LoopDriver):
    """Drives ``AsyncLLM`` on an event loop of its own thread."""

    def __init__(self) -> None:
        super().__init__(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run, daemon=True, name="nnsight-lab-engine")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def start(self, model: str, options: dict[str, Any]) -> Future[None]:
        async def build() -> None:
            from nnsight_lab.engine.model import LabVLLM  # nnsight and vLLM: seconds to import

            self.model = LabVLLM(model, dispatch=True, mode="async", launch=self.launch, **options)
            self._llm = self.model.vllm_entrypoint

        return self._schedule(build())

    def stop(self) -> None:
        def shut() -> None:
            for task in self._tasks.values():
                task.cancel()
            if self._llm is not None:
                self._llm.shutdown()

        async def end() -> None:
            shut()
            await asyncio.sleep(0)

        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._schedule(end()).result(timeout=20)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
