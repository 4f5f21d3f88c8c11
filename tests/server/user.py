"""A user's kernel, as a program: reads scripts of actions as lines of JSON, and answers what each gave.

What it gives depends on the user's own doings only, so the same script says the same alone and in company.
Every value that a block saves carries the user's number.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import httpx
import openai
import torch
from safetensors.torch import load

import nnsight_lab as lab
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.wire.serving import PREFIX

PROMPTS = (
    "The Eiffel Tower is in the city of",
    "The cat sat on the mat and looked at",
    "One, two, three, four,",
)
SHORT = {"max_tokens": 2, "temperature": 0}
#: The layer that an edit writes to, and the one that is read: what the edit does is seen there.
WRITTEN, READ = 4, 7


class Kernel:
    """One user's.

    Args:
        url: Of the server.
        token: The user's.
        number: The user's, in every value that is saved.
    """

    def __init__(self, url: str, token: str, number: int) -> None:
        self._url, self._token, self._number = url, token, number
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=120)
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120)
        self._engine: Any = None

    def run(self, script: list[list[Any]]) -> list[Any]:
        """What each action of a script gave; begins and ends with nothing on the server."""
        self.attach()
        found = [getattr(self, name)(*values) for name, *values in script]
        self._engine.stop()
        return found

    def attach(self) -> None:
        """Anew: what was there before is gone with its lease."""
        if self._engine is not None:
            self._engine.stop()
        self._engine = RemoteEngine("main", self._url, self._token)
        self._engine.start()

    def edit(self, name: str, strength: int) -> list[str]:
        """Install an edit, or its next version: it writes, and saves the user's number and its strength."""
        model, number = self._engine.model, self._number
        with self._engine.edit(name):
            model.model.layers[WRITTEN].output[0][:] += 0.1 * number * strength
            mark = torch.tensor([number, strength]).save()  # noqa: F841
        return self.listed()

    def clear(self, name: str) -> list[str]:
        """Clear an edit where it is there."""
        if name in [edit.name for edit in self._engine.edits]:
            self._engine.edits[name].clear()
        return self.listed()

    def listed(self) -> list[str]:
        """The edits that the server tells of."""
        return sorted(edit["name"] for edit in self._http.get(f"{PREFIX}/edits").raise_for_status().json())

    def trace(self, prompt: int, copies: int) -> Any:
        """A block over one prompt or several, with the edits that are on."""
        model, number = self._engine.model, self._number
        with self._engine.trace(
            [PROMPTS[prompt]] * copies if copies > 1 else PROMPTS[prompt], **SHORT
        ) as tracer:
            mark = torch.tensor([number, copies]).save()
            seen = model.model.layers[READ].output[0][-1, :8].save()
        return [_exact(mark), _near(seen), [one.outputs[0].text for one in tracer.outputs]]

    def generate(self, prompt: int, names: list[str]) -> Any:
        """Without a block; ``names`` of edits that may not be there."""
        try:
            done = self._engine.generate(PROMPTS[prompt], edits=names, **SHORT)
        except lab.errors.LabError as error:
            return type(error).__name__
        return [done[0].outputs[0].text, {name: _exact(value) for name, value in done[0].saves.items()}]

    def complete(self, prompt: int, n: int) -> Any:
        """As an OpenAI client; the saves by the response's id."""
        sampling: dict[str, Any] = {**SHORT, "temperature": 0.0 if n == 1 else 0.8, "seed": 3}
        done = self._openai.completions.create(model="demo", prompt=PROMPTS[prompt], n=n, **sampling)
        answer = self._http.get(f"{PREFIX}/saves/{done.id}")
        saves = (
            {key: _exact(value) for key, value in load(answer.content).items()} if answer.is_success else None
        )
        return [[choice.text for choice in done.choices], answer.status_code, saves]

    def leave(self, prompt: int) -> str:
        """Begin a long answer, and go away."""
        stream = self._openai.completions.create(
            model="demo",
            prompt=PROMPTS[prompt],
            temperature=0,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(iter(stream)).choices[0].text
        stream.close()
        return first

    def fail(self, prompt: int) -> str:
        """A block that raises."""
        model = self._engine.model
        try:
            with self._engine.trace(PROMPTS[prompt], **SHORT):
                model.model.layers[READ].output[0].save()
                raise KeyError(self._number)
        except KeyError as error:
            return str(error)
        except lab.errors.LabError as error:
            return str(error).splitlines()[0]
        return "nothing was raised"

    def interrupt(self, prompt: int) -> str:
        """A long request that is given up while it runs."""
        import _thread

        timer = threading.Timer(0.5, _thread.interrupt_main)
        try:
            timer.start()
            self._engine.generate(PROMPTS[prompt], max_tokens=900, temperature=0, ignore_eos=True)
        except lab.errors.Interrupted:
            return "interrupted"
        return "finished"


def _exact(value: Any) -> Any:
    return [_exact(one) for one in value] if isinstance(value, list) else value.tolist()


def _near(value: Any) -> Any:
    """A value that may differ in its last digits: how prompts share a step decides the order of sums."""
    return [_near(one) for one in value] if isinstance(value, list) else {"near": value.float().tolist()}


def main() -> None:
    """Scripts on stdin, answers on stdout."""
    url, token, number = sys.argv[1:]
    kernel = Kernel(url, token, int(number))
    for line in sys.stdin:
        print(json.dumps(kernel.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
