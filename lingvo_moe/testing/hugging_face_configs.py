"""What config.json and generation_config.json of the tiny models of `hugging_face_models` have."""

from __future__ import annotations

_SPECIAL_IDS = {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
# Marian's rows: the end, <unk>, the pieces, and padding.
_MARIAN_ROWS = 163
_MARIAN_IDS = {
    "bos_token_id": 0,
    "decoder_start_token_id": _MARIAN_ROWS - 1,
    "eos_token_id": 0,
    "pad_token_id": _MARIAN_ROWS - 1,
}
_MARIAN_SEARCH = {
    "bad_words_ids": [[_MARIAN_ROWS - 1]],
    "forced_eos_token_id": 0,
    "max_length": 512,
    "num_beams": 6,
    **_MARIAN_IDS,
}
_MADLAD_IDS = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
_SWITCH_IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def _of_both_sides(**values: int | float) -> dict:
    return {f"{side}_{name}": value for name, value in values.items() for side in ("encoder", "decoder")}


_COMMON = {
    "d_model": 32,
    "activation_function": "relu",
    "activation_dropout": 0.0,
    "attention_dropout": 0.1,
    "dropout": 0.1,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "tie_word_embeddings": True,
    "use_cache": True,
    "torch_dtype": "float32",
    **_SPECIAL_IDS,
}
_T5 = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 4,
    "layer_norm_epsilon": 1e-06,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "use_cache": True,
}
# What facebook/nllb-200-distilled-600M, facebook/nllb-moe-54b, facebook/m2m100_418M, Helsinki-NLP/opus-mt-de-en,
# google/madlad400-3b-mt and google/switch-base-8 have, with small dimensions.
CONFIGS = {
    "nllb": {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
        "tokenizer_class": "NllbTokenizer",
        "vocab_size": 506,  # 300 pieces, one more for <pad>, 202 languages, <mask>, and two rows that nothing uses
        **_of_both_sides(attention_heads=4, ffn_dim=64, layerdrop=0),
        "encoder_layers": 3,
        "decoder_layers": 2,
        "num_hidden_layers": 3,
        **_COMMON,
    },
    "nllb_moe": {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "tokenizer_class": "NllbTokenizer",
        "vocab_size": 506,
        **_of_both_sides(attention_heads=4, ffn_dim=64, layerdrop=0, layers=4, sparse_step=2),
        "num_hidden_layers": 4,
        "num_experts": 4,
        "expert_capacity": 64,
        "moe_eval_capacity_token_fraction": 1.0,
        "moe_token_dropout": 0.2,
        "normalize_router_prob_before_dropping": False,
        "batch_prioritized_routing": False,
        "router_bias": False,
        "router_dtype": "float32",
        "router_ignore_padding_tokens": False,
        "router_aux_loss_coef": 0.001,
        "router_z_loss_coef": 0.001,
        "output_router_logits": False,
        "second_expert_policy": "all",
        **_COMMON,
    },
    "m2m": {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
        "vocab_size": 407,  # 299 entries of vocab.json, 100 languages, and the eight rows of fairseq's made-up words
        **_of_both_sides(attention_heads=2, ffn_dim=64, layerdrop=0.05, layers=2),
        "num_hidden_layers": 2,
        "early_stopping": True,
        "gradient_checkpointing": False,
        "num_beams": 5,
        **_COMMON,
    },
    "marian": {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": _MARIAN_ROWS,
        "decoder_vocab_size": _MARIAN_ROWS,
        "d_model": 32,
        **_of_both_sides(attention_heads=4, ffn_dim=64, layerdrop=0.0),
        "encoder_layers": 3,
        "decoder_layers": 2,
        "num_hidden_layers": 3,
        "activation_function": "swish",
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "dropout": 0.1,
        "classif_dropout": 0.0,
        "classifier_dropout": 0.0,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_position_embeddings": 64,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "add_bias_logits": False,
        "static_position_embeddings": True,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "gradient_checkpointing": False,
        "use_cache": True,
        **_MARIAN_SEARCH,
    },
    "madlad": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 300,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "feed_forward_proj": "gated-gelu",
        "n_positions": 512,
        "output_past": True,
        "tie_word_embeddings": False,
        **_T5,
        **_MADLAD_IDS,
    },
    "switch": {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "vocab_size": 312,  # 300 pieces, ten sentinels, and two rows that nothing uses
        "num_layers": 4,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "num_experts": 4,
        "num_selected_experts": 1,
        "expert_capacity": 64,
        "router_bias": False,
        "router_dtype": "float32",
        "router_type": "tokens_masked",
        "router_jitter_noise": 0.01,
        "router_ignore_padding_tokens": False,
        "router_aux_loss_coef": 0.001,
        "router_z_loss_coef": 0.001,
        "add_router_probs": False,
        "dense_act_fn": "relu",
        "feed_forward_proj": "relu",
        "is_gated_act": False,
        **_T5,
        **_SWITCH_IDS,
    },
}
_FAIRSEQ_GENERATION = {"_from_model_config": True, "max_length": 200, **_SPECIAL_IDS}
# What generation_config.json has. Padding, whose logit is zero, has no part in the probabilities of Marian's search.
GENERATION = {
    "nllb": _FAIRSEQ_GENERATION,
    "nllb_moe": _FAIRSEQ_GENERATION,
    "m2m": _FAIRSEQ_GENERATION,
    "marian": {"renormalize_logits": True, **_MARIAN_SEARCH},
    "madlad": {"_from_model_config": True, **_MADLAD_IDS},
    "switch": {"_from_model_config": True, **_SWITCH_IDS},
}
