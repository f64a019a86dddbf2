"""Text to ids and back: the GGUF vocabularies against other implementations, and what odd texts do."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from kvern.sampling_params import InvalidRequest
from kvern.tokenizer import ByteTokenizer, load_tokenizer
from kvern.tokenizer.pre_tokenizers import byte_level_pre_tokenizer
from kvern.weights import ModelError, ModelFiles, read_model_config
from tests.models import fetch

VECTORS = [json.loads(line) for line in (Path(__file__).parents[1] / "data/smollm2_tokens.jsonl").open()]
TEXTS = [text for text, _ in VECTORS]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(ModelFiles("gguf", fetch("smollm2"), "smollm2"))


def write_gguf(path, tokenizer_model, tokens, types, **extra):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in extra.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("gguf", path, "test")


# -- SmolLM2 from its GGUF file


@pytest.mark.model
def test_ids_equal_those_of_another_implementation(smollm2):
    """CASES B131: 1000 strings with code, emoji, digits, CJK, spaces and special tokens."""
    assert len(VECTORS) == 1000
    wrong = [(text, smollm2.encode(text), ids) for text, ids in VECTORS if smollm2.encode(text) != ids]
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}"


@pytest.mark.model
def test_bytes_of_the_tokens_add_up_to_the_text(smollm2):
    for text, ids in VECTORS:
        assert b"".join(smollm2.token_bytes(i) for i in ids).decode() == text
        assert smollm2.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_every_token_decodes_as_the_package_decodes_it(smollm2):
    backend = tokenizers.Tokenizer.from_str(smollm2._backend.to_str())
    backend.decoder = decoders.ByteLevel()
    for start in range(0, smollm2.vocab_size, 64):
        ids = list(range(start, min(start + 64, smollm2.vocab_size)))
        assert smollm2.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)
        assert smollm2.decode(ids) == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.model
def test_what_smollm2_says_of_itself(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.add_bos) == (1, (2,), False)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.token_ids_of("<|im_end|>") == 2
    assert smollm2.token_ids_of("hello") is None
    assert {0, 1, 2} <= smollm2.special_token_ids
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.decode([1, *smollm2.encode("hi"), 2]) == "hi"
    assert smollm2.token_bytes(-1) == smollm2.token_bytes(49152) == b""
    assert smollm2.token_text(smollm2.encode("🦙")[0]) == "\ufffd"
    assert "<|im_start|>" in smollm2.chat_template


@pytest.mark.model
def test_empty_and_odd_texts(smollm2):
    assert smollm2.encode("") == []
    assert smollm2.decode([]) == ""
    assert smollm2.decode(smollm2.encode("a\x00b")) == "a\x00b"
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        smollm2.encode("half \ud83d of an emoji")


@pytest.mark.model
@pytest.mark.parametrize("text", [" " * 200_000, "a" * 200_000, "\n \t" * 70_000, "中" * 60_000, "!" * 200_000 + "x"])
def test_long_runs_of_one_character_do_not_blow_up(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.model
def test_threads_may_share_a_tokenizer(smollm2):
    texts = TEXTS[:300]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(smollm2.encode, texts)) == [ids for _, ids in VECTORS[:300]]


@pytest.mark.model
def test_encoding_a_long_text_does_not_stop_other_threads(smollm2):
    """CASES B117."""
    done = threading.Event()

    def work():
        smollm2.encode("The quick brown fox, 123. " * 20_000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    ticks = 0
    while not done.wait(0.005):
        ticks += 1
    thread.join()
    assert ticks >= 5  # it takes half a second; with the interpreter locked there would be one tick or two


@pytest.mark.model
@pytest.mark.slow
def test_qwen2_from_gguf_equals_transformers():
    from tokenizers import normalizers
    from transformers import AutoTokenizer

    path = fetch("qwen0.5b")
    mine = load_tokenizer(ModelFiles("gguf", path, "qwen"))
    other = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    other.backend_tokenizer.normalizer = normalizers.NFC()  # Qwen2's own; lost in the conversion
    for text in TEXTS:
        assert mine.encode(text) == other(text).input_ids, text
    assert (mine.eos_token_ids, mine.add_bos) == ((151645,), False)


# -- pre-tokenizers, without a vocabulary


def splits(pre_tokenizer, text):
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_words_are_cut_as_transformers_cuts_them():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names = {"llama-bpe", "llama3", "falcon3", "pixtral", "qwen2", "qwen35", "tekken", "gpt-4o", "llama4", "smaug-bpe"}
    assert names <= set(GGUF_PRE_TOKENIZER_SPLITS)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name in sorted(names):
        split = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
        theirs, mine = pre_tokenizers.Sequence([split, byte_level]), byte_level_pre_tokenizer(name)
        for text in TEXTS:
            assert splits(mine, text) == splits(theirs, text), (name, text)


def test_words_are_cut_as_the_built_in_ones_cut_them():
    built_in = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), built_in])
    for text in TEXTS:
        assert splits(byte_level_pre_tokenizer("gpt-2"), text) == splits(built_in, text)
        assert splits(byte_level_pre_tokenizer("default"), text) == splits(built_in, text)
        assert splits(byte_level_pre_tokenizer("smollm"), text) == splits(digits, text)


def test_an_unknown_pre_tokenizer_is_named():
    with pytest.raises(ModelError, match=r"'made-up' is not supported; supported are .*llama-bpe.*smollm"):
        byte_level_pre_tokenizer("made-up")


# -- SentencePiece style, from a GGUF file made here

SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
SPM_TOKENS += [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "ld",
    "▁wor",
    "▁world",
]
SPM_TOKENS += ["▁▁", "<start_of_turn>", "wo"]
SPM_TYPES = [2, 3, 3] + [6] * 256 + [1] * 18 + [1, 4, 1]


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    scores = [0.0] * 259 + [-float(i) for i in range(len(SPM_TOKENS) - 259)]
    return load_tokenizer(
        write_gguf(
            tmp_path_factory.mktemp("spm") / "spm.gguf",
            "llama",
            SPM_TOKENS,
            SPM_TYPES,
            token_scores=scores,
            bos_token_id=1,
            eos_token_id=2,
            unk_token_id=0,
        )
    )


def best_pair_first(text):
    """SentencePiece's rule in its plainest form: join the adjacent pair that makes the token of highest score."""
    score = {token: -i for i, token in enumerate(SPM_TOKENS[259:])}
    parts = list(text)
    while True:
        joins = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joins:
            break
        i = -max(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [SPM_TOKENS.index(part)] if part in SPM_TOKENS else [3 + byte for byte in part.encode()]
    return ids


@given(st.text(alphabet="helowrd é", max_size=20))
def test_sentencepiece_joins_the_best_pair_first(spm, text):
    expected = best_pair_first("▁" + text.replace(" ", "▁")) if text else []
    assert spm.encode(text, add_special_tokens=False) == expected
    assert spm.encode(text) == [1, *expected]
    assert spm.decode(expected) == text


def test_sentencepiece_tokens_in_bytes(spm):
    assert spm.add_bos and spm.eos_token_ids == (2,)
    assert spm.token_bytes(SPM_TOKENS.index("▁world")) == b" world"
    assert spm.token_bytes(3 + 0xE9) == b"\xe9"
    assert spm.token_bytes(1) == b"<s>"
    assert spm.special_token_ids == {0, 1, 2}
    turn = SPM_TOKENS.index("<start_of_turn>")
    assert spm.encode("hello<start_of_turn>hello", add_special_tokens=False)[1] == turn
    assert spm.decode([turn]) == "<start_of_turn>"  # user-defined, so it is text


def test_sentencepiece_without_a_space_in_front(tmp_path):
    files = write_gguf(
        tmp_path / "spm.gguf",
        "llama",
        SPM_TOKENS,
        SPM_TYPES,
        token_scores=[-float(i) for i in range(len(SPM_TOKENS))],
        add_space_prefix=False,
        bos_token_id=1,
        add_bos_token=False,
    )
    plain = load_tokenizer(files)
    assert plain.encode("hello world") == [SPM_TOKENS.index("hello"), SPM_TOKENS.index("▁world")]
    assert plain.decode([SPM_TOKENS.index("▁world")]) == " world"


# -- byte-level BPE, from small files made here


def byte_level_vocab():
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_end_of_turn_tokens_of_a_gguf_file(tmp_path):
    tokens = [*byte_level_vocab(), "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<tool_call>"]
    types = [1] * 256 + [3, 3, 3, 4]
    template = "{{ messages[0]['content'] }}<|im_end|>"
    files = write_gguf(
        tmp_path / "a.gguf",
        "gpt2",
        tokens,
        types,
        tokenizer_pre="gpt-2",
        token_merges=[],
        eos_token_id=256,
        chat_template=template,
    )
    loaded = load_tokenizer(files)
    assert loaded.eos_token_ids == (256, 257)  # the template ends turns with <|im_end|>, never with <|eot_id|>
    assert loaded.chat_template == template
    assert loaded.special_token_ids == {256, 257, 258}
    assert loaded.encode("a<tool_call><|im_end|>")[1:] == [259, 257]
    assert loaded.decode([259, 257]) == "<tool_call>"


def test_bos_of_llama3_is_added_unless_the_file_says_no(tmp_path):
    tokens, types = [*byte_level_vocab(), "<|begin_of_text|>"], [1] * 256 + [3]
    common = {"tokenizer_pre": "llama-bpe", "token_merges": [], "bos_token_id": 256}
    silent = load_tokenizer(write_gguf(tmp_path / "a.gguf", "gpt2", tokens, types, **common))
    assert silent.add_bos and silent.encode("a")[0] == 256 and len(silent.encode("a", add_special_tokens=False)) == 1
    assert silent.encode("") == [256]
    told = load_tokenizer(write_gguf(tmp_path / "b.gguf", "gpt2", tokens, types, add_bos_token=False, **common))
    assert not told.add_bos and len(told.encode("a")) == 1


def test_a_whole_word_that_is_a_token_needs_no_merges_in_llama3(tmp_path):
    tokens, types = [*byte_level_vocab(), "word"], [1] * 257
    for pre, ids in (("llama-bpe", [256]), ("gpt-2", [tokens.index(c) for c in "word"])):
        files = write_gguf(tmp_path / f"{pre}.gguf", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=[])
        assert load_tokenizer(files).encode("word", add_special_tokens=False) == ids


def test_kinds_that_are_not_supported_are_named(tmp_path):
    files = write_gguf(tmp_path / "a.gguf", "bert", ["[PAD]"], [3])
    with pytest.raises(ModelError, match="'bert' is not supported; supported are gpt2 and llama"):
        load_tokenizer(files)


def test_a_damaged_vocabulary(tmp_path):
    files = write_gguf(tmp_path / "a.gguf", "gpt2", ["a", "b"], [1, 1], tokenizer_pre="gpt-2", token_merges=["a x"])
    with pytest.raises(ModelError, match="the vocabulary is damaged"):
        load_tokenizer(files)
    with pytest.raises(ModelError, match="the vocabulary is damaged"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", "llama", ["a", "b"], [1, 1]))


# -- Hugging Face folders


@pytest.fixture
def hf_folder(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=byte_level_vocab(), show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    special = [AddedToken(name, special=True, normalized=False) for name in ("<bos>", "<eos>", "<|im_end|>")]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.enable_truncation(5)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def ids_of(folder, *names):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tuple(backend.token_to_id(name) for name in names)


def add_json(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def load_folder(folder):
    return load_tokenizer(ModelFiles("hf", folder, "test"))


def test_hf_folder(hf_folder):
    bos, eos, think = ids_of(hf_folder, "<bos>", "<eos>", "<think>")
    loaded = load_folder(hf_folder)
    assert (loaded.bos_token_id, loaded.eos_token_ids, loaded.add_bos) == (bos, (eos,), False)
    assert loaded.vocab_size == think + 1
    assert loaded.chat_template is None
    backend = tokenizers.Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    backend.no_truncation()
    for text in TEXTS[:200]:
        ids = loaded.encode(text)
        assert ids == backend.encode(text).ids  # the truncation in the file is not ours
        assert loaded.decode(ids, skip_special_tokens=False) == text
    assert loaded.decode([bos, think, eos]) == "<think>"


def test_hf_end_of_sequence_comes_from_all_files_that_name_it(hf_folder):
    eos, turn = ids_of(hf_folder, "<eos>", "<|im_end|>")
    add_json(hf_folder / "generation_config.json", eos_token_id=[7, 8])
    add_json(hf_folder / "config.json", eos_token_id=9)
    (hf_folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    loaded = load_folder(hf_folder)
    assert loaded.eos_token_ids == (7, 8, 9, eos, turn)
    assert loaded.chat_template.endswith("<|im_end|>")


def test_hf_list_of_named_templates(hf_folder):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    add_json(hf_folder / "tokenizer_config.json", chat_template=named)
    assert load_folder(hf_folder).chat_templates == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("wanted", [True, False])
def test_tokenizer_config_has_the_last_word_about_bos(hf_folder, wanted):
    (bos,) = ids_of(hf_folder, "<bos>")
    backend = tokenizers.Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    if not wanted:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
        backend.save(str(hf_folder / "tokenizer.json"))
        assert load_folder(hf_folder).encode("a")[0] == bos
    add_json(hf_folder / "tokenizer_config.json", add_bos_token=wanted)
    loaded = load_folder(hf_folder)
    assert loaded.add_bos is wanted
    assert (loaded.encode("a")[0] == bos) is wanted


def test_hf_sentencepiece_style(tmp_path):
    vocab = {token: i for i, token in enumerate(SPM_TOKENS)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_folder(tmp_path)
    assert loaded.token_bytes(vocab["▁hello"]) == b" hello"
    assert loaded.decode(loaded.encode("hello hello é")) == "hello hello é"


def test_hf_folder_errors(hf_folder, tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_folder(tmp_path / "nothing")
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.save(str(hf_folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="only byte-level BPE and SentencePiece"):
        load_folder(hf_folder)
    (hf_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        load_folder(hf_folder)


# -- bytes


@given(st.text())
def test_byte_tokenizer(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == [3 + byte for byte in text.encode()]
    assert tokenizer.decode([1, *ids, 2, 0]) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_byte_tokenizer_and_the_toy_configuration_agree():
    tokenizer, config = ByteTokenizer(), read_model_config(ModelFiles("toy", None, "toy:history-hash"))
    assert isinstance(load_tokenizer(ModelFiles("toy", None, "toy:history-hash")), ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (config.vocab_size, config.eos_token_ids)
    assert tokenizer.token_ids_of("<eos>") == 2 and tokenizer.token_ids_of("x") is None
    assert tokenizer.token_bytes(2) == b"<eos>" and tokenizer.token_bytes(259) == tokenizer.token_bytes(-1) == b""
    with pytest.raises(InvalidRequest):
        tokenizer.encode("\ud800")


def test_decoding_a_cut_character_shows_one_replacement_character():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("🦙")[:2]) == "\ufffd"
    assert np.all([tokenizer.token_text(3 + b) == "\ufffd" for b in "🦙".encode()])
