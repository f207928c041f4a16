"""More tiny models of transformers' classes: f_… has a planted failure in FP16, h_… is healthy. Second round."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)


def sp(m, s=0.1):
    with torch.no_grad():
        for _, p in m.named_parameters():
            if p.dim() > 1:
                p.normal_(0, s)
    return m.eval()


def h_vit():
    return sp(
        ViTModel(
            ViTConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
            )
        )
    ).half(), {"pixel_values": torch.randn(2, 3, 32, 32).half()}


def h_bert():
    return sp(
        BertModel(
            BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
        )
    ), {"input_ids": torch.randint(0, 80, (2, 20))}


def h_gpt2():
    return sp(GPT2LMHeadModel(GPT2Config(vocab_size=80, n_embd=32, n_layer=3, n_head=4, n_positions=64))), {
        "input_ids": torch.randint(0, 80, (2, 20))
    }


def h_mamba():
    return sp(MambaForCausalLM(MambaConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2, state_size=8))), {
        "input_ids": torch.randint(0, 80, (2, 20))
    }


def h_resnet():
    return ResNetModel(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}


def f_bert_ff():
    m = sp(
        BertModel(
            BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
        )
    )
    with torch.no_grad():
        m.encoder.layer[1].intermediate.dense.weight.mul_(2e5)
        m.encoder.layer[1].output.dense.weight.mul_(1e-3)
    return m.bfloat16(), {"input_ids": torch.randint(0, 80, (2, 20))}


def f_gpt2_wpe():
    m = sp(GPT2LMHeadModel(GPT2Config(vocab_size=80, n_embd=32, n_layer=3, n_head=4, n_positions=64)))
    with torch.no_grad():
        m.transformer.h[1].attn.c_attn.weight.mul_(4000)
        m.transformer.h[1].attn.c_attn.bias.mul_(0)
        m.transformer.h[1].attn.c_proj.weight.mul_(1e-3)
    m.set_attn_implementation("eager")
    return m.bfloat16(), {"input_ids": torch.randint(0, 80, (2, 20))}
