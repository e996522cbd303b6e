"""Let a checkpoint of a ByteGPT end a line of Python: one process, torch and transformers, nothing else.

Usage: python examples/generate.py checkpoints/demo.ckpt "    def __init__(self, "
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(path: str, prompt: str) -> None:
    checkpoint = torch.load(path, weights_only=True)
    sizes = checkpoint["hyper_parameters"]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=sizes["context"],
            n_layer=sizes["layers"],
            n_embd=sizes["width"],
            n_head=sizes["heads"],
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    model.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()})
    torch.manual_seed(0)
    text = torch.tensor([list(prompt.encode())])
    text = model.generate(
        text, max_new_tokens=80, do_sample=True, temperature=0.5, eos_token_id=ord("\n"), pad_token_id=0
    )
    print(bytes(text[0].tolist()).decode(errors="replace").rstrip())


if __name__ == "__main__":
    main(*sys.argv[1:3])
