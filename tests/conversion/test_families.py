"""Each family's models and ours made from them compute the same: states, logits, losses, gradients, generations."""

import pytest
import torch
from families import CASES, SPREAD, Wide, inputs, our_model, precise, real_tokens, their_model

from fratrie.conversion import to_hf

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
NAMES = [case.name for case in CASES]
STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def pair(case, **choices):
    theirs = their_model(case, **choices)
    return theirs, our_model(theirs)


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def pools_the_first_place(theirs):
    """Their poolers take a row's first place for its first token, which on the left is padding."""
    return "SequenceClassification" in type(theirs).__name__ or getattr(theirs, "pooler", None) is not None


# What a configuration adds is the same to both implementations (tests/models/test_common.py).
EAGER = [case for case in CASES if case.fields is SPREAD[case.model_type][0]]


@pytest.mark.parametrize(
    ("case", "implementation"),
    [pytest.param(case, "sdpa", id=case.name) for case in CASES]
    + [pytest.param(case, "eager", id=f"{case.name}-eager") for case in EAGER],
)
def test_equal_states_and_logits(case, implementation):
    theirs, ours = pair(case, implementation=implementation)
    for side in ("right", "left"):
        if side == "left" and (case.model_type in ("marian", "bart", "led", "vit") or not case.reads_left_padding):
            continue  # their positions count the padding; images have none
        their_inputs, our_inputs = inputs(case, theirs, side)
        with torch.no_grad(), precise(case):
            expected = theirs(**their_inputs, output_hidden_states=True)
            actual = ours(**our_inputs, output_hidden_states=True)
        names = ["last_hidden_state"]
        if side == "right" or not pools_the_first_place(theirs):
            names += ["logits", "pooler_output"]
        compared = [(name, actual[name], expected[name]) for name in names if expected.get(name) is not None]
        for name in STATES:
            if expected.get(name) is not None:
                # ViT alone leaves the last of them without its norm.
                layers = slice(None, -1) if case.model_type == "vit" else slice(None)
                assert len(actual[name]) == len(expected[name])
                compared += [
                    (name, *states) for states in zip(actual[name][layers], expected[name][layers], strict=True)
                ]
        assert len(compared) > 1
        for name, ours_, theirs_ in compared:
            rows = real_tokens(case, our_inputs, theirs_) if "decoder" not in name else ...
            close(ours_[rows], theirs_[rows], TOLERANCES[torch.float64])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_equal_in_float32(case):
    theirs, ours = pair(case, dtype=torch.float32)
    their_inputs, our_inputs = inputs(case, theirs)
    with torch.no_grad():
        expected, actual = theirs(**their_inputs)[0], ours(**our_inputs)[0]
    rows = real_tokens(case, our_inputs, expected)
    assert actual.dtype == torch.float32
    close(actual[rows], expected[rows], TOLERANCES[torch.float32] * max(1.0, float(expected[rows].abs().max())))


def labels_for(case, theirs, arguments):
    """Targets of each kind of head."""
    if "Token" in case.theirs:
        return torch.where(arguments["attention_mask"].bool(), arguments["input_ids"] % 3, -100)
    if "Classification" in case.theirs:
        return torch.tensor([2, 0])
    if theirs.config.is_encoder_decoder:
        return torch.tensor([[4, 5, 6, 1], [7, 8, 1, -100]])
    return torch.where(arguments["attention_mask"].bool(), arguments["input_ids"], -100)


WITH_LOSS = [case for case in CASES if not case.theirs.endswith("Model") or case.theirs == "MarianMTModel"]


@pytest.mark.parametrize("case", WITH_LOSS, ids=[case.name for case in WITH_LOSS])
def test_equal_losses_and_gradients(case):
    theirs, ours = pair(case)
    their_inputs, our_inputs = inputs(case, theirs)
    labels = their_labels = labels_for(case, theirs, our_inputs)
    if case.theirs in ("BartForCausalLM", "MarianForCausalLM"):  # which do not shift them
        their_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with precise(case):
        expected, actual = theirs(**their_inputs, labels=their_labels).loss, ours(**our_inputs, labels=labels).loss
        close(actual, expected, 1e-10)
        expected.backward()
        actual.backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters(remove_duplicate=False)
                 if weight.grad is not None}  # fmt: skip
    theirs_as_ours = case.recipe.read_weights(gradients, case.head, theirs.config)
    compared = 0
    for name, weight in ours.named_parameters():
        if name in theirs_as_ours:
            close(weight.grad, theirs_as_ours[name], 1e-10)
            compared += 1
    # A bias of the logits is a buffer there, a weight here.
    assert compared >= len(list(ours.parameters())) - 1 > 5


BALANCED = [
    case for case in WITH_LOSS
    if case.theirs in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")
    and case.fields.get("decoder_sparse_step", 0) <= case.fields["num_hidden_layers"]  # some layer has a router
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("case", BALANCED, ids=[case.name for case in BALANCED])
def test_equal_losses_with_balanced_experts(case, training):
    theirs = their_model(case, router_aux_loss_coef=0.5, output_router_logits=True).train(training)
    ours = our_model(theirs)
    their_inputs, our_inputs = inputs(case, theirs)
    labels = labels_for(case, theirs, our_inputs)
    with Wide():
        expected, actual = theirs(**their_inputs, labels=labels), ours(**our_inputs, labels=labels)
    close(actual.loss, expected.loss, 1e-6)  # their balancing loss is made in float32
    assert actual.aux_loss > 0 and len(actual.router_logits) == len(expected.router_logits)


GENERATING = [case for case in CASES if case.generates]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", GENERATING, ids=[case.name for case in GENERATING])
def test_equal_generation(case, beams):
    theirs, ours = pair(case)
    side = "right" if theirs.config.is_encoder_decoder else "left"
    _, arguments = inputs(case, theirs, side)
    arguments.pop("decoder_input_ids", None)
    if case.model_type in ("bart", "marian") and side == "left":
        # Their positions count the padding, and a cache of theirs would mix up the encoder's states with its own.
        arguments = {"input_ids": arguments["input_ids"][:1]}
    if not case.reads_left_padding:
        arguments = {name: value[:1] for name, value in arguments.items()}
    if theirs.config.is_encoder_decoder:
        arguments["decoder_start_token_id"] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "use_cache": True}
    with precise(case):
        expected, actual = theirs.generate(**arguments, **options), ours.generate(**arguments, **options)
    assert torch.equal(actual, expected)
    assert expected.shape[1] > 3


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_there_and_back(case):
    theirs, ours = pair(case)
    back = to_hf(ours)
    assert type(back) is type(theirs) and back.dtype == theirs.dtype
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    unread = set() if getattr(theirs.config, "tie_word_embeddings", True) else {"lm_head.bias", "cls.predictions.bias"}
    unread |= {"bert.pooler.weight", "bert.pooler.bias"} if case.model_type == "big_bird" else set()
    for name in before.keys() - unread:
        assert torch.equal(before[name], after[name]), name
    free = {"_name_or_path", "dtype", "transformers_version", "architectures"}
    configs = [{k: v for k, v in model.config.to_dict().items() if k not in free} for model in (theirs, back)]
    assert configs[0] == configs[1]
    storages = {weight.data_ptr() for weight in theirs.parameters()}
    assert not storages & {weight.data_ptr() for model in (ours, back) for weight in model.parameters()}
