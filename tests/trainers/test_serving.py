"""`transformers serve` and `transformers chat` on a decoder that carries its code, unmodified."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_texts import TEXTS, sizes
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fratrie
from fratrie.tokenization import train_byte_level_bpe, with_sibling

openai = pytest.importorskip("openai", reason="the extra `ecosystem` is not installed")
Serve = pytest.importorskip("transformers.cli.serve").Serve
ModelManager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]

# Each message is a line, the answer follows `moi:`.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}moi: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Tu as un frère ?"}]
TOKENS = 12


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A decoder that writes letters only, its tokenizer, and the folder with its code."""
    tokenizer = with_sibling(train_byte_level_bpe(TEXTS, vocab_size=300, show_progress=False), "decoder")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    fields = {**sizes(tokenizer), "max_position_embeddings": 512}
    config = fratrie.FratrieDecoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, position_type="rotary",
        **fields,
    )  # fmt: skip
    model = fratrie.FratrieDecoderForCausalLM(config).eval()
    letters = [index for index in range(len(tokenizer)) if tokenizer.decode([index]).isalpha()]
    model.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - set(letters))
    folder = tmp_path_factory.mktemp("served") / "decoder"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fratrie.export_code(model, folder)
    return model, tokenizer, str(folder)


@pytest.fixture(scope="module")
def answer(decoder):
    """What the model itself writes."""
    model, tokenizer, _ = decoder
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
    text = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.isalpha() and len(text) >= TOKENS
    return text


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def wait_for(port, log, process=None, seconds=120):
    for _ in range(10 * seconds):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process is None or process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no server after {seconds} seconds: {log.read_text()}")


@pytest.fixture(scope="module")
def server(decoder, tmp_path_factory):
    """The port of `transformers serve FOLDER --trust-remote-code`, a process that never imports fratrie itself."""
    folder = tmp_path_factory.mktemp("server")
    port, log = free_port(), folder / "log.txt"
    command = [Path(sys.executable).with_name("transformers"), "serve", decoder[2], "--trust-remote-code",
               "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
        try:
            wait_for(port, log, process)
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(port, model, **kwargs):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60) as client:
        options = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS, **kwargs}
        answer = client.chat.completions.create(**options)
        if not kwargs.get("stream"):
            return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens
        return [chunk.choices[0].delta.content for chunk in answer if chunk.choices[0].delta.content]


def test_the_server_answers_as_the_model(server, decoder, answer):
    assert ask(server, decoder[2]) == (answer, "length", TOKENS)
    pieces = ask(server, decoder[2], stream=True)
    assert "".join(pieces) == answer
    assert len(pieces) > TOKENS // 2


def test_a_chat_in_the_terminal(server, decoder, answer):
    # Its client refuses every address, this machine's too, in Hugging Face's offline mode; `main` looks for updates.
    script = "from transformers.cli.transformers import app; app()"
    flags = [f"max_new_tokens={TOKENS}", "do_sample=False"]
    done = subprocess.run(
        [sys.executable, "-c", script, "chat", decoder[2], f"http://127.0.0.1:{server}/v1", *flags, "--user", "moi"],
        input=f"{MESSAGES[0]['content']}\nn\n!exit\n",
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "0", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout


def test_continuous_batching_in_a_process_that_knows_fratrie(decoder, answer, tmp_path):
    port = free_port()
    # Without a size of its cache, continuous batching takes nearly all memory of a CPU (Llama's too).
    serve = Serve(
        decoder[2], continuous_batching=True, cb_num_blocks=16, cb_max_batch_tokens=32, device="cpu", host="127.0.0.1",
        port=port, non_blocking=True,
    )  # fmt: skip
    try:
        wait_for(port, tmp_path)
        assert ask(port, decoder[2])[0] == answer
    finally:
        serve.kill_server()


class OtherLlamaConfig(LlamaConfig):
    model_type = "other_llama"


class OtherLlamaForCausalLM(LlamaForCausalLM):
    config_class = OtherLlamaConfig


def test_the_server_loads_registered_classes_by_the_decision_door_only(decoder, tmp_path):
    """Why our decoder is registered there too: Llama under another name, an `AutoModelForCausalLM`, fails."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    AutoConfig.register("other_llama", OtherLlamaConfig)
    AutoModelForCausalLM.register(OtherLlamaConfig, OtherLlamaForCausalLM)
    OtherLlamaForCausalLM(OtherLlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path)
    decoder[1].save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is OtherLlamaForCausalLM
    with pytest.raises(AttributeError, match="module transformers has no attribute OtherLlamaForCausalLM"):
        ModelManager(device="cpu", force_model=str(tmp_path))
    manager = ModelManager(device="cpu", force_model=decoder[2])
    try:
        assert isinstance(manager.loaded_models[decoder[2]].model, fratrie.FratrieDecoderForCausalLM)
    finally:
        manager.shutdown()
