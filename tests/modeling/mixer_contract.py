"""The contract that every mixer keeps, as a class of tests: a subclass says what is particular to one mixer.

Padding on either side, packing, cache in pieces, causality, a plain reference, a degenerate case, gradients,
precision, compilation, export, accounting, parallel plans, saving.
"""

from typing import Any, ClassVar

import pytest
import torch
from layouts import rows_of_stack
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import Cache, DynamicCache

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, FratrieEncoderConfig, FratrieEncoderForMaskedLM
from fratrie.accounting import cache_bytes, count_parameters, forward_flops
from fratrie.modeling.mixers import MIXERS
from fratrie.modeling.stack import FratrieStack
from fratrie.onnx_export import export_onnx

VOCAB = 40


def texts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


def pad(documents, side):
    """Padded ids and mask; the padding is a token like any other, so that only the mask can hide it."""
    width = max(map(len, documents)) + 1
    ids = torch.full((len(documents), width), 7)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        start = 0 if side == "right" else width - len(document)
        ids[row, start : start + len(document)] = document
        mask[row, start : start + len(document)] = 1
    return ids, mask


def alone(model, document, **kwargs):
    return model(document[None], **kwargs).last_hidden_state[0]


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a cache, wherever its layers hold them."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def of_causal_stacks(test):
    test.is_of_causal_stacks = True
    return test


class MixerContract:
    """Tests of one mixer.

    Class attributes:
        mixer: its name in the registry.
        layer_type: what it runs under.
        fields: configuration fields that it needs.
        variants: further fields to run most of the tests with.
        degenerate: two sets of fields (they may name another mixer) that must give equal outputs.
        implementations: of attention.
        sides: where padding may stand before a text goes on from its cache.
        counted_dtype: in which torch's counter sees all of its operations.
    """

    mixer: ClassVar[str]
    layer_type: ClassVar[str]
    fields: ClassVar[dict[str, Any]] = {}
    variants: ClassVar[list[dict[str, Any]]] = [{}]
    degenerate: ClassVar[tuple[dict[str, Any], dict[str, Any]]]
    implementations: ClassVar[list[str]] = ["sdpa"]
    sides: ClassVar[tuple[str, ...]] = ("left", "right")
    counted_dtype: ClassVar[torch.dtype] = torch.float32

    def sees(self, distance, causal):
        """Whether a query sees a key at distance `key - query`, before causality."""
        return True

    def plain(self, mixer, hidden, causal, angles, real):
        """The mixer on `(T, D)` written out; `real` tells which tokens are no padding, `angles` turns them or is None.

        What it gives for padding is not compared.
        """
        raise NotImplementedError

    def rows_without_keys(self, mixer, hidden):
        """What the mixer gives for `(T, D)` that see no key."""
        return torch.zeros_like(hidden)

    @classmethod
    def directions(cls):
        mixer = MIXERS[cls.mixer]
        return [causal for causal, runs in ((True, mixer.runs_causal), (False, mixer.runs_bidirectional)) if runs]

    def pytest_generate_tests(self, metafunc):
        cls = type(self)
        if "causal" in metafunc.fixturenames:
            metafunc.parametrize("causal", cls.directions(), ids=lambda c: "causal" if c else "bidirectional")
        if "variant" in metafunc.fixturenames:
            names = ["-".join(map(str, fields.values())) or "plain" for fields in cls.variants]
            metafunc.parametrize("variant", cls.variants, ids=names)
        if "padded_side" in metafunc.fixturenames:
            metafunc.parametrize("padded_side", cls.sides)
        if "implementation" in metafunc.fixturenames:
            metafunc.parametrize("implementation", cls.implementations)

    def __init_subclass__(cls):
        """Leave out the tests of causal stacks, which alone have caches, for a mixer that cannot be part of one."""
        super().__init_subclass__()
        if hasattr(cls, "mixer") and True not in cls.directions():
            for name in dir(cls):
                if getattr(getattr(cls, name), "is_of_causal_stacks", False):
                    setattr(cls, name, None)

    def config(self, causal, **fields):
        number = fields.get("num_hidden_layers", 2)
        return (FratrieDecoderConfig if causal else FratrieEncoderConfig)(
            **{
                "vocab_size": VOCAB,
                "hidden_size": 16,
                "num_hidden_layers": number,
                "num_attention_heads": 4,
                "intermediate_size": 24,
                "max_position_embeddings": 64,
                "position_type": "none",
                "layer_types": [self.layer_type] * number,
                "mixer_types": [self.mixer] * number,
                **self.fields,
                **fields,
            }
        )

    def build(self, causal, variant=None, dtype=torch.float64, **fields) -> FratrieStack:
        """A stack of two layers with weights large enough that every term of a formula shows."""
        return self.build_with_head(causal, {**(variant or {}), **fields}, dtype).model

    def build_with_head(self, causal, fields, dtype=torch.float64):
        torch.manual_seed(0)
        head = FratrieDecoderForCausalLM if causal else FratrieEncoderForMaskedLM
        model = head(self.config(causal, **fields))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
        return model.to(dtype).eval()

    @pytest.fixture
    def layouts(self, monkeypatch):
        """The names of the layouts that stacks run in."""
        taken, original = [], FratrieStack.run

        def spy(stack, inputs, layout, *args, **kwargs):
            taken.append(type(layout).__name__)
            return original(stack, inputs, layout, *args, **kwargs)

        monkeypatch.setattr(FratrieStack, "run", spy)
        return taken

    # --- padding and packing ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
    def test_padding_on_either_side_changes_nothing(self, causal, variant, side, unpad, layouts):
        model = self.build(causal, variant, unpad_inputs=unpad)
        documents = texts(5, 8, 1, 6)
        ids, mask = pad(documents, side)
        options = {"use_cache": False} if causal else {}
        states = model(ids, attention_mask=mask, **options).last_hidden_state
        assert layouts == ["Groups" if unpad else "Rows"]
        for row, document in enumerate(documents):
            close(states[row][mask[row].bool()], alone(model, document))

    @of_causal_stacks
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_changes_nothing_where_a_cache_is_made(self, side, variant, layouts):
        model = self.build(True, variant)
        documents = texts(5, 8, 1)
        ids, mask = pad(documents, side)
        outputs = model(ids, attention_mask=mask)
        assert layouts == ["Rows"] and outputs.cache is not None
        for row, document in enumerate(documents):
            close(outputs.last_hidden_state[row][mask[row].bool()], alone(model, document))

    @pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens"])
    def test_packed_documents_equal_separate_ones(self, causal, variant, form, layouts):
        model = self.build(causal, variant)
        documents = texts(5, 1, 7, 4)
        lengths = [len(document) for document in documents]
        if form == "position_ids":
            hints = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
        else:
            hints = {"cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int()}
        states = model(torch.cat(documents)[None], **hints).last_hidden_state
        assert layouts == ["Groups"]
        for part, document in zip(states[0].split(lengths), documents, strict=True):
            close(part, alone(model, document))

    def test_gradients_stay_within_a_packed_document(self, causal, variant):
        model = self.build(causal, variant)
        embeds = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
        place = torch.cat([torch.arange(4), torch.arange(5)])[None]
        states = model(inputs_embeds=embeds, position_ids=place).last_hidden_state
        (grad,) = torch.autograd.grad(states[0, 4:].square().sum(), embeds)
        assert not grad[0, :4].any()
        assert grad[0, 4:].abs().sum(-1).gt(0).all()

    # --- cache and causality ---------------------------------------------------------------------------------------

    @of_causal_stacks
    @pytest.mark.parametrize("pieces", [[1] * 9, [3, 1, 5], [9], [8, 1], [2, 7]], ids=str)
    @pytest.mark.parametrize("mask_given", [True, False], ids=["mask", "no mask"])
    def test_cached_pieces_equal_one_pass(self, variant, pieces, mask_given):
        model = self.build(True, variant)
        ids = torch.stack(texts(9, 9))
        expected = model(ids, use_cache=False).last_hidden_state
        cache, states, seen = DynamicCache(config=model.config), [], 0
        for piece in ids.split(pieces, dim=1):
            seen += piece.shape[1]
            options = {"attention_mask": torch.ones(2, seen, dtype=torch.long)} if mask_given else {}
            if model.config.position_type == "rotary" and not mask_given:
                options["position_ids"] = torch.arange(seen - piece.shape[1], seen)[None]
            states.append(model(piece, cache=cache, **options).last_hidden_state)
        close(torch.cat(states, dim=1), expected)

    @of_causal_stacks
    @pytest.mark.parametrize("pieces", [[9], [4, 5], [1] * 9], ids=str)
    def test_cached_pieces_of_a_left_padded_batch_equal_one_pass(self, variant, pieces):
        model = self.build(True, variant)
        documents = texts(5, 8)
        ids, mask = pad(documents, "left")
        cache, states, seen = DynamicCache(config=model.config), [], 0
        for piece in ids.split(pieces, dim=1):
            seen += piece.shape[1]
            states.append(model(piece, attention_mask=mask[:, :seen], cache=cache).last_hidden_state)
        for row, document in enumerate(documents):
            close(torch.cat(states, dim=1)[row][mask[row].bool()], alone(model, document))

    @of_causal_stacks
    def test_a_padded_batch_goes_on_from_its_cache_as_its_texts_alone(self, padded_side, variant):
        """What the cache keeps was made by real tokens alone, wherever the padding stands."""
        model = self.build(True, variant)
        documents = texts(8, 5)
        ids, mask = pad([document[:-2] for document in documents], padded_side)
        cache, steps = DynamicCache(config=model.config), torch.stack([document[-2:] for document in documents])
        model(ids, attention_mask=mask, cache=cache)
        mask = torch.cat((mask, torch.ones(2, 2, dtype=torch.long)), dim=1)
        states = model(steps, attention_mask=mask, cache=cache).last_hidden_state
        for row, document in enumerate(documents):
            close(states[row], alone(model, document)[-2:])

    @of_causal_stacks
    @pytest.mark.parametrize("records", [True, False], ids=["records", "plain"])
    def test_a_cropped_cache_goes_on_right_or_refuses(self, variant, records):
        """As speculative decoding asks of it, which takes back the tokens that a draft had wrong."""
        model = self.build(True, variant)
        (document,) = texts(9)
        cache = DynamicCache(config=model.config)
        if records:
            cache.activate_past_recording()
        mask = torch.ones(1, 9, dtype=torch.long)
        model(document[None, :3], attention_mask=mask[:, :3], cache=cache)
        model(document[None, [3, 8, 7]], attention_mask=mask[:, :6], cache=cache)
        try:
            cache.crop(-2)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            assert not MIXERS[self.mixer].keeps_tokens or self.layer_type == "sliding_attention", error
            return
        states = model(document[None, 4:], attention_mask=mask, cache=cache).last_hidden_state
        close(states[0], alone(model, document)[4:])

    def test_a_token_sees_just_what_it_may(self, causal, variant):
        """By gradient, in a stack of one layer: the exact pattern."""
        model = self.build(causal, variant, num_hidden_layers=1)
        embeds = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
        options = {"use_cache": False} if causal else {}
        states = model(inputs_embeds=embeds, **options).last_hidden_state
        for query in range(8):
            weights = torch.randn(16, dtype=torch.float64)
            (grad,) = torch.autograd.grad(states[0, query] @ weights, embeds, retain_graph=True)
            for key in range(8):
                visible = self.sees(key - query, causal) and not (causal and key > query)
                assert bool(grad[0, key].any()) == visible, (query, key)

    @of_causal_stacks
    def test_a_later_token_changes_no_earlier_output(self, variant):
        """What is sorted or chosen by the tokens has no gradient, and could leak all the same."""
        model = self.build(True, variant)
        (document,) = texts(11)
        states = alone(model, document, use_cache=False)
        for place in (4, 10):
            other = document.clone()
            other[place] = (other[place] + 5) % VOCAB
            changed = alone(model, other, use_cache=False)
            close(changed[:place], states[:place])
            assert not torch.allclose(changed[place], states[place])

    # --- reference -------------------------------------------------------------------------------------------------

    def test_equals_its_plain_form_with_gradients(self, implementation, causal, variant):
        model = self.build(causal, variant, attn_implementation=implementation)
        mixer, rotary = model.layers[0].mixer, model.config.position_type == "rotary"
        hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
        mask = torch.tensor([[1] * 5, [0, 1, 1, 1, 1]])
        layout = rows_of_stack(model, hidden, mask)
        order = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]])
        turned = torch.stack([angles(places, model.config.head_dim) for places in order]) if rotary else None
        if rotary:  # in float64, as the plain form has them
            cos, sin = turned.cos().unsqueeze(1), turned.sin().unsqueeze(1)
            layout.rotations[self.layer_type] = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
        outputs, _ = mixer(hidden, layout)
        expected = torch.stack(
            [
                self.plain(mixer, hidden[row], causal, turned[row] if rotary else None, mask[row].tolist())
                for row in range(2)
            ]
        )
        real = mask.bool()
        close(outputs[real], expected[real])
        inputs = [hidden, *mixer.parameters()]
        weights = torch.randn_like(outputs) * mask[..., None]  # what padding gives has no meaning
        gradients, expected_gradients = (
            torch.autograd.grad((states * weights).sum(), inputs) for states in (outputs, expected)
        )
        for actual, wanted in zip(gradients, expected_gradients, strict=True):
            close(actual, wanted, 1e-9)

    def test_gradients_equal_finite_differences(self, causal, variant):
        model = self.build(causal, variant)
        mixer, hidden = model.layers[0].mixer, torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
        layout = rows_of_stack(model, hidden, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))

        def mix(states, *weights):
            named = dict(zip([name for name, _ in mixer.named_parameters()], weights, strict=True))
            outputs, _ = torch.func.functional_call(mixer, named, (states, layout))
            return outputs[0].sum(), (outputs[1, 1:] ** 2).sum()

        weights = [weight.detach().clone().requires_grad_() for weight in mixer.parameters()]
        torch.autograd.gradcheck(mix, (hidden, *weights), fast_mode=True, atol=1e-6)

    def test_degenerate_case(self, causal):
        ids = torch.stack(texts(11, 11))
        first, second = (self.build(causal, **fields)(ids).last_hidden_state for fields in self.degenerate)
        close(first, second)

    # --- empty rows and half precision -----------------------------------------------------------------------------

    @pytest.mark.parametrize("position_type", ["none", "alibi", "relative"])
    def test_fully_masked_rows_give_zeros_and_no_gradient(self, position_type, implementation, causal):
        fields = {"position_type": position_type, "attn_implementation": implementation}
        if position_type != "none" and not MIXERS[self.mixer].takes_position_bias:
            with pytest.raises(ValueError, match="takes no position bias"):
                self.build(causal, **fields)
            return
        model = self.build(causal, **fields)
        mixer = model.layers[0].mixer
        hidden = torch.randn(3, 6, 16, dtype=torch.float64, requires_grad=True)
        mask = torch.tensor([[1] * 6, [0] * 6, [0, 0, 1, 1, 1, 1]])
        layout = rows_of_stack(model, hidden, mask)
        outputs, _ = mixer(hidden, layout, layout.biases.get(self.layer_type))
        close(outputs[1], self.rows_without_keys(mixer, hidden[1]))
        if causal:
            close(outputs[2, :2], self.rows_without_keys(mixer, hidden[2, :2]))
        # As large as the gradients under the loss scale of a mixed-precision run.
        gradients = torch.autograd.grad(outputs.sum() * 2.0**16, [hidden, *mixer.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[0][1].any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
    def test_runs_in_every_precision(self, implementation, causal, dtype, unpad):
        options = {**self.variants[-1], "attn_implementation": implementation, "unpad_inputs": unpad}
        model, exact = self.build(causal, dtype=dtype, **options), self.build(causal, **options)
        ids, mask = pad(texts(5, 8, 1), "left")
        mask[2] = 0
        states = model(ids, attention_mask=mask).last_hidden_state
        assert states.dtype == dtype and states.isfinite().all()
        real = mask.bool()
        expected = exact(ids, attention_mask=mask).last_hidden_state
        error = (states[real].double() - expected[real]).norm() / expected[real].norm()
        assert error < 30 * torch.finfo(dtype).eps
        loss = states[real].square().mean()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

    def test_large_states_stay_finite_in_float16(self, causal):
        """Sums over forty tokens pass 65504, the largest number of float16."""
        model = self.build(causal, dtype=torch.float16)
        hidden = torch.randn(2, 40, 16, dtype=torch.float16) * 10
        outputs, _ = model.layers[0].mixer(hidden, rows_of_stack(model, hidden))
        assert outputs.isfinite().all()

    # --- what else a model does ------------------------------------------------------------------------------------

    def test_compiles_into_one_graph_for_all_lengths(self, causal):
        torch._dynamo.reset()
        model = self.build(causal, dtype=torch.float32, **self.variants[-1], num_hidden_layers=1)
        options = {"use_cache": False} if causal else {}
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        for length in (7, 5, 11):
            ids = torch.stack(texts(length, length))
            close(compiled(ids, **options).last_hidden_state, model(ids, **options).last_hidden_state, 1e-5)

    @of_causal_stacks
    def test_a_decoder_exports_its_cache_or_is_refused_by_name(self, tmp_path):
        mixer = MIXERS[self.mixer]
        if not mixer.keeps_tokens:
            model = self.build_with_head(True, {}, torch.float32)
            with pytest.raises(ValueError, match=rf"mixer_types=\['{self.mixer}', '{self.mixer}'\]"):
                export_onnx(model, tmp_path / "model.onnx")
            return
        past = self.build(True)(torch.stack(texts(5))).cache
        assert [(layer.keys.ndim, layer.values.ndim) for layer in past.layers] == [(4, 4)] * 2, "keys and values"

    @of_causal_stacks
    def test_continuous_batching_is_refused_where_no_paged_cache_fits(self):
        model = self.build_with_head(True, {}, torch.float32)
        if MIXERS[self.mixer].fits_paged_cache:
            assert type(model.init_continuous_batching()).__name__ == "ContinuousBatchingManager"
            return
        with pytest.raises(ValueError, match=rf"mixer_types=\['{self.mixer}', '{self.mixer}'\]"):
            model.init_continuous_batching()

    @pytest.mark.parametrize("length", [1, 6])
    def test_its_cost_is_what_torch_counts(self, causal, variant, length):
        config = self.config(causal, **variant, attn_implementation="eager")
        head = (FratrieDecoderForCausalLM if causal else FratrieEncoderForMaskedLM)(config).eval()
        head.to(self.counted_dtype)
        options = {"use_cache": False} if causal else {}
        ids = torch.stack(texts(length, length))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            head(ids, **options)
        assert forward_flops(config, 2, length) == counter.get_total_flops()
        assert count_parameters(config).total == sum(weight.numel() for weight in head.parameters())

    def test_training_keeps_about_as_much_as_it_says(self, causal, variant):
        model = self.build(causal, variant, torch.float32)
        mixer, hidden = model.layers[0].mixer, torch.randn(2, 24, 16, requires_grad=True)
        layout, kept = rows_of_stack(model, hidden), {}
        weights = {weight.untyped_storage().data_ptr() for weight in mixer.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(hidden, layout)
        measured = sum(storage.nbytes() for storage in kept.values()) / (2 * 24 * 4)
        said = MIXERS[self.mixer].activation_numbers(model.config, self.layer_type, 24, torch.float32)
        assert 0.5 < said / measured < 2, (said, measured)

    @of_causal_stacks
    @pytest.mark.parametrize("length", [1, 6])
    def test_its_cache_is_as_large_as_it_says(self, variant, length):
        model = self.build(True, variant, torch.float32)
        cache: Cache = model(torch.stack(texts(length, length))).cache
        held = tensors_in([vars(layer) for layer in cache.layers])
        assert cache_bytes(model.config, 2, length, torch.float32) == sum(
            x.numel() * x.element_size() for x in held if x.is_floating_point()
        )

    def test_its_plan_names_what_it_builds(self, causal, variant):
        model = self.build_with_head(causal, variant)
        mixer = model.model.layers[0].mixer
        names = {name for name, _ in [*mixer.named_modules(), *mixer.named_parameters()]}
        assert MIXERS[self.mixer].tensor_parallel_plan(model.config).keys() <= names
        assert {name for name in model.tp_plan if ".mixer." in name} == {
            f"model.layers.*.mixer.{name}" for name in MIXERS[self.mixer].tensor_parallel_plan(model.config)
        }

    def test_comes_back_from_a_folder_as_it_was(self, causal, variant, tmp_path):
        model = self.build_with_head(causal, variant, torch.float32)
        model.save_pretrained(tmp_path)
        back = type(model).from_pretrained(tmp_path)
        assert back.config.mixer_types == [self.mixer] * 2 and back.config.layer_types == [self.layer_type] * 2
        ids = torch.stack(texts(9, 9))
        assert torch.equal(back(ids).logits, model(ids).logits)

    def test_training_starts_from_drawn_weights(self, causal):
        """Every parameter that the mixer adds is drawn or set, also where memory was not."""
        with torch.device("meta"):
            empty = (FratrieDecoderForCausalLM if causal else FratrieEncoderForMaskedLM)(self.config(causal))
        filled = empty.to_empty(device="cpu")
        for weight in filled.parameters():
            weight.data.fill_(torch.nan)
        filled.init_weights()
        assert all(weight.isfinite().all() for weight in filled.parameters())


def angles(places, size, theta=10_000.0):
    """`(T, size / 2)` angles of the pairs of a head."""
    frequencies = theta ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    return places[:, None].double() * frequencies


def turn(x, angle):
    """Turn the pairs (i, i + C/2) of a head by their angles, as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)
