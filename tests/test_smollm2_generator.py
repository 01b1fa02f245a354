"""SmolLM2's chain, round by round, against Transformers' own DFlash candidate generator on the same weights.

The generator runs inside `target.generate(assistant_model=..., speculation_type="dflash")`: its `get_candidates` and
`update_candidate_strategy`, its cache, its choice of features and positions, and Transformers' own verification. The
assistant is Transformers' class with the tensors of the checkpoint, read here and not by ddlab.

One thing is swapped: the mask of the sliding layers. The assistant's own lets a slot of the block see later slots, and
keys at a distance of exactly the window; this drafter was trained with causal sliding layers, which see keys nearer
than the window (`block_attention` in its config). So they get what Transformers' `create_sliding_window_causal_mask`
makes of the same arguments. The full layer keeps the assistant's own mask.

Two conventions of the last round differ and are put into Transformers' terms: where one token is left, it drafts
nothing; where the text ends with an accepted draft, it counts that one as the target's own token.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation import utils
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.masking_utils import create_bidirectional_mask, create_sliding_window_causal_mask

from ddlab import Decoder, Pair, load_pair
from ddlab.pair import embedded_folder
from ddlab.smollm2 import cache_folder
from ddlab.sweeps.promptfile import read_prompts

DRAFTER = embedded_folder("smollm2-dflash")
CACHED = (cache_folder() / "SmolLM2-135M-Instruct" / "source.json").is_file()
Round = tuple[list[int], int]  # drafts, and how many of them were accepted


def assistant(folder: Path, *, swapped: bool = True) -> MuseGlimmerAssistantModel:
    """Transformers' class with the float32 tensors of a checkpoint in z-lab's format."""
    config = json.loads((folder / "config.json").read_text())
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**(config | config["dflash_config"])))
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({names.get(name, name): tensor.float() for name, tensor in state.items()})
    if swapped:
        model.register_forward_pre_hook(with_causal_sliding_layers, with_kwargs=True)
    return model.eval()


def with_causal_sliding_layers(
    model: MuseGlimmerAssistantModel, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made_of = {
        "config": model.config,
        "inputs_embeds": given["noise_embeds"],
        "attention_mask": given["attention_mask"],
        "cache": given["cache"],
    }
    masks = {
        "full_attention": create_bidirectional_mask(**made_of),
        "sliding_attention": create_sliding_window_causal_mask(**made_of, allow_is_causal_skip=False),
    }
    return args, {**given, "attention_mask": masks}


def transformers_rounds(pair: Pair, drafter: Any, ids: list[int], new: int) -> tuple[list[Round], list[int]]:
    """Rounds and new tokens of Transformers' assisted generation."""
    rounds: list[Round] = []

    class Watched(DFlashTokenCandidateGenerator):
        def get_candidates(self, input_ids: torch.Tensor, **keywords: Any) -> Any:
            candidates, logits = super().get_candidates(input_ids, **keywords)
            self.drafts = candidates[0, input_ids.shape[1] :].tolist()
            return candidates, logits

        def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            super().update_candidate_strategy(input_ids, scores, num_matches)
            rounds.append((self.drafts, int(num_matches)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "DFlashTokenCandidateGenerator", Watched)
        prompt = torch.tensor([ids])
        out = pair.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=drafter,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=list(pair.stop_token_ids) or None,
            pad_token_id=0,
        )
    return rounds[1:], out[0, len(ids) :].tolist()  # the first is the prompt's own forward


def ddlab_rounds(pair: Pair, ids: list[int], new: int) -> tuple[list[Round], list[int]]:
    """The same of ddlab's chain, the last round in Transformers' terms (see the top of the file)."""
    decoder, rounds = Decoder(pair, method="dflash", max_new_tokens=new), []
    decoder.start(ids)
    while not decoder.finished:
        left = new - len(decoder.output_ids)
        step = decoder.step()
        drafts = step.tree.tokens[1:].tolist() if left > 1 else []
        rounds.append((drafts, step.accepted - (step.bonus is None)))
    return rounds, decoder.output_ids


# -- in miniature -------------------------------------------------------------------------------------------------


VOCAB, WINDOW = 8, 12  # so few ids that random drafts are accepted now and then
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's architecture and its drafter's in small, with random weights, as two checkpoints."""
    folder = tmp_path_factory.mktemp("small")
    layers, rope = 6, {"rope_type": "default", "rope_theta": 100000.0}
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(1)
    target = LlamaForCausalLM(
        LlamaConfig(**SIZES, **no_ids, num_hidden_layers=layers, rope_parameters=rope, tie_word_embeddings=True)
    )
    models.randomize(target)
    target.save_pretrained(folder / "target")
    config = json.loads((DRAFTER / "config.json").read_text())
    config |= {**SIZES, **no_ids, "num_target_layers": layers, "sliding_window": WINDOW, "dtype": "float32"}
    config["dflash_config"] |= {"mask_token_id": 3, "target_layer_ids": [1, 2, 4]}
    drafter = folder / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config))
    save_file(models.drafter_state(config, seed=1), drafter / "model.safetensors")
    return folder


def small_prompt(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("prompt", [5, 30])  # the window fills on the way, or is full from the start
def test_a_small_pair_drafts_and_accepts_as_transformers_does(small: Path, prompt: int) -> None:
    pair, ids = load_pair(small / "target", small / "drafter"), small_prompt(prompt)
    rounds, text = transformers_rounds(pair, assistant(small / "drafter"), ids, 48)
    assert ddlab_rounds(pair, ids, 48) == (rounds, text)
    assert len({accepted for _, accepted in rounds}) > 2


def test_the_swapped_mask_is_seen_in_the_drafts(small: Path) -> None:
    pair, ids = load_pair(small / "target", small / "drafter"), small_prompt(30)
    own, text = transformers_rounds(pair, assistant(small / "drafter", swapped=False), ids, 48)
    rounds, same_text = ddlab_rounds(pair, ids, 48)
    assert own[0] != rounds[0]
    assert text == same_text


# -- the real pair ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not CACHED and "DDLAB_TEST_SMOLLM2" not in os.environ, reason="SmolLM2 is not cached; it would be 90 MB to download"
)
def test_smollm2_drafts_and_accepts_as_transformers_does() -> None:
    pair, drafter = load_pair("smollm2"), assistant(DRAFTER)
    prompts = [entry.prompt for entry in read_prompts()]
    for prompt in (prompts[24], prompts[36], " ".join(prompts[24:36])):  # the last is longer than the window
        ids = list(pair.encode(prompt).ids)
        assert ddlab_rounds(pair, ids, 48) == transformers_rounds(pair, drafter, ids, 48), prompt
