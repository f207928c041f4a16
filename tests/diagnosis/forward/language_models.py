"""Tiny models of transformers' classes: f_… has a planted failure in FP16, h_… is healthy. First round."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperModel,
)


def ids(v=100, b=2, n=24):
    return torch.randint(3, v, (b, n))


def gemma(**k):
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            **k,
        )
    ).eval()


def qwen():
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    ).eval()


def llama(**k):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            **k,
        )
    ).eval()


def neox():
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    ).eval()


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    ).eval()


def whisper():
    return WhisperModel(
        WhisperConfig(
            vocab_size=100,
            num_mel_bins=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            d_model=32,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=50,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ).eval()


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=128,
        )
    ).eval()


def spread(model, s=0.15):  # weights of a size that makes logits differ
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, s)
    return model


# healthy
def h_gemma():
    return spread(gemma()).bfloat16(), {"input_ids": ids()}


def h_qwen():
    return spread(qwen()).bfloat16(), {"input_ids": ids()}


def h_llama():
    return spread(llama(attn_implementation="eager")), {"input_ids": ids()}


def h_neox():
    return spread(neox()).bfloat16(), {"input_ids": ids()}


def h_t5():
    return spread(t5()).bfloat16(), {"input_ids": ids(), "decoder_input_ids": ids(n=6)}


def h_whisper():
    return spread(whisper()).bfloat16(), {
        "input_features": torch.randn(1, 16, 100).bfloat16(),
        "decoder_input_ids": ids(b=1, n=6),
    }


def h_mixtral():
    return spread(mixtral()).bfloat16(), {"input_ids": ids()}


# planted
def f_gemma_stream():
    m = spread(gemma())
    with torch.no_grad():
        # a massive channel in the stream: written by layer 0, taken back by layer 2
        m.model.layers[0].post_feedforward_layernorm.weight[5] = 6.0e4
        m.model.layers[2].post_feedforward_layernorm.weight.mul_(1.0)
    return m.bfloat16(), {"input_ids": ids()}


def f_qwen_gate():
    m = spread(qwen())
    with torch.no_grad():
        m.model.layers[2].mlp.gate_proj.weight[7] *= 400
        m.model.layers[2].mlp.up_proj.weight[7] *= 800
        m.model.layers[2].mlp.down_proj.weight[:, 7] /= 3e5
    return m.bfloat16(), {"input_ids": ids()}


def f_t5_o():
    m = spread(t5())
    with torch.no_grad():
        m.encoder.block[0].layer[0].SelfAttention.o.weight[3] *= 1.5e5
        m.encoder.block[1].layer[0].layer_norm.weight[3] = 0
        m.encoder.block[0].layer[1].layer_norm.weight[3] = 0
        m.encoder.block[1].layer[1].layer_norm.weight[3] = 0
        m.encoder.final_layer_norm.weight[3] = 0
    return m.bfloat16(), {"input_ids": ids(), "decoder_input_ids": ids(n=6)}


def f_llama_scores():
    m = spread(llama(attn_implementation="eager"))
    with torch.no_grad():
        m.model.layers[1].self_attn.q_proj.weight.mul_(300)
        m.model.layers[1].self_attn.k_proj.weight.mul_(300)
    return m.bfloat16(), {"input_ids": ids()}


def f_neox_bias():
    m = spread(neox())
    with torch.no_grad():
        m.gpt_neox.layers[1].mlp.dense_4h_to_h.bias[2] = 9e4
    return m.bfloat16(), {"input_ids": ids()}


def f_whisper_conv():
    m = spread(whisper())
    with torch.no_grad():
        m.encoder.conv1.weight.mul_(2e4)
        m.encoder.conv2.weight.div_(2e4)
    return m.bfloat16(), {"input_features": 40 * torch.randn(1, 16, 100).bfloat16(), "decoder_input_ids": ids(b=1, n=6)}
