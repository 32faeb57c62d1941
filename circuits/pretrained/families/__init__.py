"""The families of architectures that are read, by the name that `config.json` gives them."""

from __future__ import annotations

from circuits.pretrained.families.gemma2 import GEMMA2
from circuits.pretrained.families.gpt2 import GPT2
from circuits.pretrained.families.gpt_neo import GPT_NEO
from circuits.pretrained.families.gpt_neox import GPT_NEOX
from circuits.pretrained.families.gptj import GPTJ
from circuits.pretrained.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from circuits.pretrained.families.phi import PHI
from circuits.pretrained.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (GPT2, GPT_NEO, GPT_NEOX, GPTJ, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, PHI)
}
