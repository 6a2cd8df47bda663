"""How much of a request's prompts the text encoder reads."""

from __future__ import annotations

from typing import Any

from parallel.events import PromptCut
from runtime.requests import Request

TEXT_TOKENS = 512
"""What Wan's transformers are trained with; the pipelines cut a longer prompt."""


def prompt_cuts(tokenizer: Any, index: int, request: Request) -> tuple[PromptCut, ...]:
    """Returns what the pipeline will cut off the prompts of a request.

    Args:
        tokenizer: The pipeline's tokenizer, of transformers.
        index: The request's number, from 0.
        request: Its negative prompt counts only with guidance, as in the pipeline.
    """
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    texts = {"prompt": request.prompt}
    if request.guidance > 1:
        texts["negative_prompt"] = request.negative_prompt
    cuts = []
    for name, text in texts.items():
        # One special token ends the text and is kept, whatever is cut.
        tokens = tokenizer(prompt_clean(text), verbose=False).input_ids
        if len(tokens) > TEXT_TOKENS:
            left_out = tokenizer.decode(tokens[TEXT_TOKENS - 1 :], skip_special_tokens=True).strip()
            cuts.append(PromptCut(index, name, len(tokens), TEXT_TOKENS, left_out))
    return tuple(cuts)
