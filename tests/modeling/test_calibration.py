import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fratrie import FratrieEncoderConfig, FratrieEncoderForSequenceClassification
from fratrie.modeling.calibration import calibrate, check_points

STEPS = st.lists(st.tuples(st.floats(0.1, 3), st.floats(0, 3)), min_size=2, max_size=6)


def line_of(steps):
    return np.cumsum(steps, axis=0).tolist()


def naive(x, line):
    x_K, y_K = np.array(line, dtype=np.float64).T
    first, last = np.diff(y_K)[[0, -1]] / np.diff(x_K)[[0, -1]]
    if x < x_K[0]:
        return y_K[0] + first * (x - x_K[0])
    return y_K[-1] + last * (x - x_K[-1]) if x > x_K[-1] else np.interp(x, x_K, y_K)


@given(st.lists(STEPS, min_size=1, max_size=4), st.lists(st.floats(-30, 30), min_size=1, max_size=8))
def test_each_label_follows_its_line_and_goes_on_beyond_its_ends(steps, values):
    points = [line_of(each) for each in steps]
    check_points(points, len(points))
    got = calibrate(torch.tensor(values)[:, None].expand(-1, len(points)), points)
    expected = [[naive(value, line) for line in points] for value in np.float32(values)]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_it_acts_in_evaluation_alone_on_logits_and_loss():
    config = FratrieEncoderConfig(
        **{"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 2},
        problem_type="multi_label_classification",
    )
    torch.manual_seed(0)
    model = FratrieEncoderForSequenceClassification(config)
    ids, labels = torch.tensor([[3, 4, 5]]), torch.tensor([[1.0, 0.0]])
    raw = model.train()(input_ids=ids).logits
    config.label_calibration = [[[-1, -3], [1, 3]], [[0, 1], [2, 2]]]
    torch.testing.assert_close(model.train()(input_ids=ids).logits, raw)
    output = model.eval()(input_ids=ids, labels=labels)
    expected = torch.stack([3 * raw[:, 0], 1 + raw[:, 1] / 2], dim=-1)
    torch.testing.assert_close(output.logits, expected)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(expected, labels)
    torch.testing.assert_close(output.loss, loss)
    assert model.bfloat16()(input_ids=ids).logits.dtype == torch.bfloat16
