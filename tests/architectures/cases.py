"""Tiny sizes of every architecture that the oracle knows. Head size times heads differs from the width wherever the architecture can."""

from tests.architectures.oracle import Case

TOKENS = {"vocab_size": 37, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FREE = {"hidden_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 3, "intermediate_size": 29, **TOKENS}
TIED = {key: value for key, value in FREE.items() if key != "head_dim"} | {"hidden_size": 48}  # head size is width over heads
MHA = {key: value for key, value in TIED.items() if key != "num_key_value_heads"}
GPT = {"n_embd": 40, "n_head": 4, "n_layer": 3, "n_positions": 64, **TOKENS}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 7}
MLA = {
    "hidden_size": 44, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "intermediate_size": 29, **TOKENS,
    "kv_lora_rank": 14, "q_lora_rank": 11, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
}  # fmt: skip
FEW_EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "moe_intermediate_size": 7}
FALCON = {"hidden_size": 40, "num_attention_heads": 4, "num_hidden_layers": 3, **TOKENS}
FALCON_NEW = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 48, "mamba_d_state": 4}
SHARED_KEYS = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 37, "hidden_size_per_layer_input": 5, "laurel_rank": 3, "intermediate_size": [29] * 6,
    "activation_sparsity_pattern": [0.0] * 6, "altup_num_inputs": 2,
}  # fmt: skip
STACKS = {
    "d_model": 40, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 29, "decoder_start_token_id": 1, **TOKENS,
}  # fmt: skip
SOUND = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}

# fmt: off
CASES = [
    Case("llama", FREE),
    Case("llama", FREE | {"attention_bias": True}, variant="biases"),
    Case("mistral", FREE),
    Case("mixtral", FREE | {"num_local_experts": 2}),
    Case("qwen2", TIED),
    Case("qwen2_moe", TIED | MOE),
    Case("qwen3", FREE, qk="head"),
    Case("qwen3_moe", FREE | MOE, qk="head"),
    Case("gemma", FREE),
    Case("gemma2", FREE),
    Case("gemma3_text", FREE, qk="head"),
    Case("phi", TIED, norm="layer"),
    Case("phi", MHA | {"qk_layernorm": True}, norm="layer", qk="head", variant="qk"),
    Case("phi3", TIED),
    Case("olmo", TIED, norm="layer"),
    Case("olmo2", TIED, norm="", qk="token"),
    Case("olmo3", TIED, norm="", qk="token"),
    Case("olmoe", TIED | MOE, qk="token"),
    Case("smollm3", TIED),
    Case("granite", TIED),
    Case("granitemoe", TIED | {"num_local_experts": 2}),
    Case("cohere", TIED, norm="layer"),
    Case("cohere", TIED | {"use_qk_norm": True}, norm="layer", qk="head", variant="qk"),
    Case("cohere2", FREE, norm="layer"),
    Case("stablelm", TIED | {"partial_rotary_factor": 0.5, "use_qkv_bias": True}, norm="layer"),
    Case("stablelm", TIED | {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_qkv_bias": True}, norm="layer", qk="head", variant="qk"),
    Case("starcoder2", TIED, norm="layer"),
    Case("nemotron", FREE, norm="layer"),
    Case("glm", FREE | {"attention_bias": True}),
    Case("glm4", FREE | {"attention_bias": True}),
    Case("glm4_moe", FREE | FEW_EXPERTS | {"use_qk_norm": True}, qk="head", variant="qk"),
    Case("dots1", FREE | FEW_EXPERTS, qk="head"),
    Case("hunyuan_v1_dense", FREE, qk="head"),
    Case("llama4_text", FREE | {"num_local_experts": 2, "intermediate_size_mlp": 29}, qk="head"),
    Case("gpt_oss", FREE | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    Case("seed_oss", FREE),
    Case("exaone4", TIED, norm="", qk="head"),
    Case("arcee", FREE),
    Case("apertus", TIED, qk="head"),
    Case("ernie4_5", FREE | {"use_bias": True}),
    Case("minimax_m2", FREE | {"num_local_experts": 2, "num_experts_per_tok": 1}, qk="token"),
    Case("phimoe", TIED | {"num_local_experts": 2, "attention_bias": True}, norm="layer"),
    Case("bitnet", TIED, o="token"),
    Case("nanochat", TIED, qk="head"),
    Case("qwen3_next", FREE | MOE | LINEAR | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}, qk="head", gated=True),
    Case("jamba", TIED | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 2, "mamba_dt_rank": 2}),
    Case("granitemoehybrid", TIED | MAMBA | {"num_local_experts": 2, "layer_types": ["mamba", "attention", "mamba"]}),
    Case("lfm2", TIED | {"layer_types": ["conv", "full_attention", "full_attention"]}, qk="head"),
    Case("olmo_hybrid", TIED | LINEAR | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}, norm="", qk="token"),
    Case("gemma3n_text", FREE | SHARED_KEYS, qk="head", v="head", input="input_layernorm", kv_from=((4, 2), (5, 3))),
    Case("gpt2", GPT, norm="layer"),
    Case("gpt_neo", {"hidden_size": 40, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], **TOKENS}, norm="layer", bypasses=True),
    Case("gptj", GPT | {"rotary_dim": 4}, norm="layer"),
    Case("gpt_neox", MHA, norm="layer"),
    Case("codegen", GPT | {"rotary_dim": 4}, norm="layer"),
    Case("persimmon", MHA, norm="layer", qk="head"),
    Case("falcon", FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}, norm="layer", bypasses=True, variant="old"),
    Case("falcon", FALCON | {"multi_query": True}, norm="layer", bypasses=True, variant="multi_query"),
    Case("falcon", FALCON_NEW, norm="layer", bypasses=True, variant="new"),
    Case("falcon", FALCON_NEW | {"num_ln_in_parallel_attn": 1}, norm="layer", bypasses=True, variant="one_norm"),
    Case("bloom", {"hidden_size": 40, "n_head": 4, "n_layer": 3, **TOKENS}, norm="layer", bypasses=True),
    Case("mpt", {"d_model": 40, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, **TOKENS}, norm="layer", bypasses=True),
    Case("opt", MHA | {"ffn_dim": 29, "word_embed_proj_dim": 48}, norm="layer"),
    Case("opt", MHA | {"ffn_dim": 29, "word_embed_proj_dim": 48, "do_layer_norm_before": False}, norm="", variant="post"),
    Case("xglm", {"d_model": 40, "attention_heads": 4, "num_layers": 2, "ffn_dim": 29, **TOKENS}, norm="layer", bypasses=True),
    Case("biogpt", MHA, norm="layer"),
    Case("gpt_bigcode", GPT | {"multi_query": True}, norm="layer"),
    Case("gpt_bigcode", GPT | {"multi_query": False}, norm="layer", variant="mha"),
    Case("deepseek_v2", MLA | FEW_EXPERTS, qk="mla", v="token"),
    Case("deepseek_v2", MLA | FEW_EXPERTS | {"q_lora_rank": None}, qk="mla", v="token", variant="direct"),
    Case("deepseek_v3", MLA | FEW_EXPERTS | {"attention_bias": False}, qk="mla", v="token"),
    Case("minicpm3", MLA, qk="mla", v="token"),
    Case("bert", MHA, norm=""),
    Case("roberta", MHA, norm=""),
    Case("electra", MHA | {"embedding_size": 8}, norm=""),
    Case("esm", MHA, norm="layer"),
    Case("distilbert", {"dim": 40, "n_heads": 4, "n_layers": 3, "hidden_dim": 29, **TOKENS}, norm=""),
    Case("modernbert", MHA | {"cls_token_id": 1, "sep_token_id": 2, "norm_bias": True}, norm="layer"),
    Case("nomic_bert", MHA, norm=""),
    Case("mpnet", MHA, norm="", bypasses=True),
    Case("vit", MHA | {"image_size": 8, "patch_size": 4}, norm="layer"),
    Case("dinov2", MHA | {"image_size": 8, "patch_size": 4}, norm="layer"),
    Case("siglip_vision_model", MHA | {"image_size": 8, "patch_size": 4}, norm="layer"),
    Case("clip_text_model", MHA, norm="layer"),
    Case("whisper", STACKS | SOUND, norm="layer"),
    Case("bart", STACKS, norm=""),
    Case("t5", {"d_model": 40, "d_kv": 7, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3, "d_ff": 29, "decoder_start_token_id": 1, **TOKENS}),
]
# fmt: on
