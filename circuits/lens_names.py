"""Names that TransformerLens has and this toolkit has not: what to write instead.

Read only where an attribute is missing, to say more than that it is. Arguments are in docs/migration.md.
"""

from __future__ import annotations

from collections.abc import Mapping

_HOOKS = "hooks are arguments: model.run_with_hooks(tokens, fwd_hooks=[(name, function)]), or with model.hooks(...): …"
_LOAD = 'circuits.load("hf:ORG/NAME"), a folder or a file; circuits.pretrained.from_transformer_lens(model)'
_FOLD = "circuits.processing: fold_ln, center_writing_weights, center_unembed and fold_value_biases give a new model"

PACKAGE = {"HookedTransformer": f"HookedGPT, made by {_LOAD}", "HookedTransformerConfig": "GPTConfig"}

MODEL = {
    "from_pretrained": _LOAD,
    "from_pretrained_no_processing": _LOAD,
    "add_hook": _HOOKS,
    "add_perma_hook": _HOOKS,
    "reset_hooks": "nothing: no hook is ever left behind",
    "hook_dict": "model.hook_names; a hook is named by its text, such as 'blocks.0.attn.hook_z'",
    "hook_points": "model.hook_names",
    "loss_fn": "model.loss(tokens, per_token=...)",
    "process_weights_": _FOLD,
    "fold_layer_norm": _FOLD,
    "center_writing_weights": _FOLD,
    "center_unembed": _FOLD,
    "fold_value_biases": _FOLD,
    "refactor_factored_attn_matrices": "circuits.gauge.canonical(model)",
    "set_use_attn_result": "nothing: ask for the names, run_with_cache(tokens, names_filter=[..., 'attn.hook_result'])",
    "set_use_split_qkv_input": "nothing: hook_q_input, hook_k_input and hook_v_input are there when named",
    "all_composition_scores": "analysis.composition_scores(model, kind) for kind 'Q', 'K' or 'V'",
    "tokens_to_residual_directions": "model.W_U[:, token]",
    "load_and_process_state_dict": "HookedGPT.from_state_dict(config, state_dict)",
    "W_E_pos": "model.W_E and model.W_pos",
}

CACHE = {
    "decompose_resid": "circuits.residual.decompose(model, cache, unit='layer')",
    "stack_head_results": "circuits.residual.decompose(model, cache, unit='head')",
    "stack_neuron_results": "circuits.residual.decompose(model, cache, unit='neuron')",
    "get_full_resid_decomposition": "circuits.residual.decompose(model, cache, unit='neuron')",
    "compute_head_results": "names_filter=[..., 'blocks.0.attn.hook_result'] in run_with_cache",
    "get_neuron_results": "circuits.residual.decompose(model, cache, unit='neuron')",
    "logit_attrs": "circuits.residual.direct_logit_attribution(model, cache, correct, wrong)",
    "apply_ln_to_stack": "circuits.residual.direct_logit_attribution, which reads the norm in; logit_lens for streams",
    "remove_batch_dim": "cache[name][0], or cache.select_batch(0), which keeps the axis",
    "apply_slice_to_batch_dim": "cache.select_batch(rows)",
    "cache_dict": "the cache itself, a mapping from name to tensor",
    "model": "the model that you have: a cache holds none, functions take both",
}


def absent(owner: str, name: str, hints: Mapping[str, str]) -> str:
    """The message for an attribute that is not here, with what takes its place where TransformerLens has it."""
    hint = f"; here, unlike in TransformerLens: {hints[name]}" if name in hints else ""
    return f"{owner!r} object has no attribute {name!r}{hint}"
