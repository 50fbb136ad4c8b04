"""Recurrent mixers: the contract, torch's own layers with the same weights, and what becomes of gradients over time."""

from typing import Any, ClassVar

import pytest
import torch
from mixer_contract import MixerContract
from torch import nn
from transformers.cache_utils import DynamicCache

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling.mixers import MIXERS


class RecurrentContract(MixerContract):
    layer_type = "linear_attention"
    degenerate = ({}, {"num_attention_heads": 2})  # they have no heads

    def step(self, inner, state, recurrent):
        """The state `(numbers, E)` after a token, from W x + b (`inner`) and U and b (`recurrent`)."""
        raise NotImplementedError

    def plain(self, mixer, hidden, causal, angles, real):
        places = [place for place in range(len(hidden)) if real[place]]
        directions = []
        for direction, order in (("", places), ("_reverse", places[::-1]))[: 1 if causal else 2]:
            w, u, b, c = (
                getattr(mixer, f"{name}_l0{direction}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            state, outputs = hidden.new_zeros(mixer.states, mixer.size), {}
            for place in order:
                state = self.step(w @ hidden[place] + b, state, lambda h, u=u, c=c: u @ h + c)
                outputs[place] = state[0]
            zeros = hidden.new_zeros(mixer.size)
            directions.append(torch.stack([outputs.get(place, zeros) for place in range(len(hidden))]))
        return torch.cat(directions, dim=-1)


class TestRNN(RecurrentContract):
    mixer = "rnn"
    layer_type = "linear_attention"

    def step(self, inner, state, recurrent):
        return (inner + recurrent(state[0])).tanh()[None]


class TestLSTM(RecurrentContract):
    mixer = "lstm"
    layer_type = "linear_attention"
    counted_dtype = torch.float64  # torch's counter skips the fused kernel of float32

    def step(self, inner, state, recurrent):
        enter, forget, candidate, show = (inner + recurrent(state[0])).chunk(4)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * candidate.tanh()
        return torch.stack((show.sigmoid() * cell.tanh(), cell))


class TestGRU(RecurrentContract):
    mixer = "gru"
    layer_type = "linear_attention"

    def step(self, inner, state, recurrent):
        reset, update, candidate = zip(inner.chunk(3), recurrent(state[0]).chunk(3), strict=True)
        reset, update = sum(reset).sigmoid(), sum(update).sigmoid()
        new = (candidate[0] + reset * candidate[1]).tanh()
        return ((1 - update) * new + update * state[0])[None]
