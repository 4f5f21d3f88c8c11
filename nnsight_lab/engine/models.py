"""From what a user calls a model to what vLLM loads, refused early where it cannot work.

vLLM finds out about a missing model twenty seconds into a start, inside another process; everything
that can be seen from here is checked before.
"""

from __future__ import annotations

from pathlib import Path

from nnsight_lab.errors import ModelNotFound, nearest

#: The embedded model, and what it is called on `%engine start`.
DEMO = "demo"
_HUB_S = 5.0
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.pth")


def resolve(model: str, *, dummy: bool = False) -> str:
    """The path or id vLLM should load for ``model``.

    Args:
        model: ``demo``, a local folder or file, or a Hugging Face id.
        dummy: Whether weights are made up (``load_format="dummy"``), so that none are needed.

    Raises:
        ModelNotFound: With what was looked for and where.
    """
    if model == DEMO:
        from nnsight_lab.engine.demo import demo_model  # converts once; imports transformers

        return str(demo_model())
    path = Path(model).expanduser()
    if path.exists():
        return str(_local(path, dummy))
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ModelNotFound(f"There is no model at {path}.{nearest(path.name, siblings)}")
    return _hub(model)


def _local(path: Path, dummy: bool) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelNotFound(f"{path} is a file; give the folder that has config.json and the weights.")
    if not (path / "config.json").is_file() and not (path / "params.json").is_file():
        raise ModelNotFound(f"{path} has no config.json, so it is not a model's folder.")
    if not dummy and not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        raise ModelNotFound(
            f'{path} has a configuration but no weights (use load_format="dummy" for random ones).'
        )
    return path


def _hub(model: str) -> str:
    """Check that a Hugging Face id is cached, or that the hub knows it."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    hint = nearest(model, [DEMO])
    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return model
        HfApi().model_info(model, timeout=_HUB_S)  # one question, without the retries of a download
    except HFValidationError:
        raise ModelNotFound(
            f"{model!r} is neither a local folder nor a possible Hugging Face id.{hint}"
        ) from None
    except GatedRepoError:
        raise ModelNotFound(
            f"{model!r} is gated: accept its terms on Hugging Face and log in (`hf auth login`)."
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"Hugging Face has no model {model!r}, or it is private to somebody else.{hint}"
        ) from None
    except Exception as error:  # no network, a proxy, a hub that is down: all the same to the user
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{model!r} is not a local folder, is not in the Hugging Face cache, and the hub cannot be "
            f"reached ({type(error).__name__}: {reason}).{hint}"
        ) from None
    return model
