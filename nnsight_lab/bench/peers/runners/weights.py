"""Random weights of a configuration, as a checkpoint: then every peer has the same ones, and values can be
compared.

vLLM's own ``load_format="dummy"`` would give each peer others, and all so small that a layer adds nothing
to the residual stream: a peer that returned another layer's values would pass.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from nnsight_lab.bench.peers.runners.measuring import on_cuda


def main(config: Path, folder: Path, results: Path) -> None:
    """Make them on the device, in bfloat16 there and float32 elsewhere."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    cuda = on_cuda()
    torch.manual_seed(20)
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config, local_files_only=True))
    folder.mkdir(parents=True)
    model.save_pretrained(folder, max_shard_size="4GB")
    # The configuration as it was given, not as this version of transformers would write it.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (config / name).is_file():
            shutil.copyfile(config / name, folder / name)
    results.write_text(json.dumps({"done": True}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
