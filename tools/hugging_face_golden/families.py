"""What the families of models have each in its own way: examples, languages, pieces, and the table of positions.

It shares no code with lingvo_moe. Importing it needs the standard library alone.
"""

# The packages of its functions are in an environment of their own: see __main__.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import tempfile
from typing import Any

from tools.hugging_face_golden import sentences
from tools.hugging_face_golden.sentences import Example


class _OfFairseq:
    """What models whose classes are those of fairseq have in common."""

    def source(self, example: Example) -> str:
        """Returns the text of an example's source as the tokenizer reads it."""
        return example.source

    def decoder_input(self, model: Any, labels: list[int]) -> list[int]:
        """Returns the labels, shifted by Hugging Face's own function, which the model calls when it is given labels."""
        import torch

        config, module = model.config, importlib.import_module(type(model).__module__)
        row = torch.tensor([labels])
        return module.shift_tokens_right(row, config.pad_token_id, config.decoder_start_token_id)[0].tolist()

    def shared(self, model: Any) -> Any:
        """Returns the embedding that both sides share."""
        return model.model.shared

    def epsilon(self, model: Any) -> float:
        """Returns that of layer normalisation."""
        return model.model.encoder.layers[0].self_attn_layer_norm.eps


class Multilingual(_OfFairseq):
    """M2M-100, NLLB-200 and NLLB-MoE: the tokens of both sides begin with their language."""

    examples = sentences.EXAMPLES

    def choose_languages(self, tokenizer: Any, example: Example) -> int | None:
        """Tells a tokenizer an example's languages, and returns the token that every hypothesis begins with."""
        own = self._languages(tokenizer)
        tokenizer.src_lang = own.get(example.source_language, example.source_language)
        tokenizer.tgt_lang = own.get(example.target_language, example.target_language)
        if hasattr(tokenizer, "get_lang_id"):
            return tokenizer.get_lang_id(tokenizer.tgt_lang)
        return tokenizer.convert_tokens_to_ids(tokenizer.tgt_lang)

    def _languages(self, tokenizer: Any) -> dict[str, str]:
        return sentences.SHORT_NAMES if "M2M" in type(tokenizer).__name__ else {}

    def positions(self, model: Any, side: str) -> Any:
        """Returns the table of positions of `encoder` or `decoder`."""
        return getattr(model.model, side).embed_positions.weights

    def embedding_scale(self, model: Any) -> float:
        """Returns what the embeddings are multiplied by."""
        return model.model.encoder.embed_tokens.embed_scale

    def facts(self, model: Any, tokenizer: Any) -> dict:
        """Returns what only this family has."""
        sparse = {side: self._sparse_layers(getattr(model.model, side)) for side in ("encoder", "decoder")}
        return {"sparse_layers": sparse} if any(sparse.values()) else {}

    def _sparse_layers(self, side: Any) -> list[int]:
        return [index for index, layer in enumerate(side.layers) if getattr(layer, "is_sparse", False)]


class Marian(_OfFairseq):
    """Marian: one direction, a SentencePiece model of each side, and one table of the pieces of both."""

    examples = sentences.GERMAN_TO_ENGLISH

    def choose_languages(self, tokenizer: Any, example: Example) -> int | None:
        """There is nothing to choose, and the model chooses the first token."""
        return None

    def positions(self, model: Any, side: str) -> Any:
        """Returns the table of positions of `encoder` or `decoder`."""
        return getattr(model.model, side).embed_positions.weight

    def embedding_scale(self, model: Any) -> float:
        """Returns what the embeddings are multiplied by."""
        return model.model.encoder.embed_scale

    def facts(self, model: Any, tokenizer: Any) -> dict:
        """Returns what only this family has."""
        return {
            "bad_words_ids": model.generation_config.bad_words_ids,
            # The worker checks it: only `renormalize_logits` takes from these tokens their share of the probability.
            "bad_words_have_a_share": {"hypotheses": True, "renormalized_hypotheses": False},
            "logits_include_final_logits_bias": _adds_bias(model),
            # Without this package, punctuation is not normalised before SentencePiece reads a text.
            "has_sacremoses": importlib.util.find_spec("sacremoses") is not None,
            "pieces": _pieces(tokenizer),
            "with_language": _with_language(tokenizer),
        }


class _OfT5:
    """What models of T5's architecture have in common."""

    def source(self, example: Example) -> str:
        """Returns the text of an example's source as the tokenizer reads it."""
        return example.source

    def choose_languages(self, tokenizer: Any, example: Example) -> int | None:
        """Nothing is told the tokenizer, and the model chooses the first token."""
        return None

    def decoder_input(self, model: Any, labels: list[int]) -> list[int]:
        """Returns the labels, shifted by Hugging Face's own function, which the model calls when it is given labels."""
        import torch

        return model._shift_right(torch.tensor([labels]))[0].tolist()

    def positions(self, model: Any, side: str) -> list:
        """There is no table of positions."""
        return []

    def embedding_scale(self, model: Any) -> float:
        """Returns what the embeddings are multiplied by."""
        return 1.0

    def shared(self, model: Any) -> Any:
        """Returns the embedding that both sides share."""
        return model.shared

    def epsilon(self, model: Any) -> float:
        """Returns that of layer normalisation."""
        return model.encoder.block[0].layer[0].layer_norm.variance_epsilon

    def facts(self, model: Any, tokenizer: Any) -> dict:
        """Returns what only this family has."""
        return {"buckets": {side: self._buckets(getattr(model, side)) for side in ("encoder", "decoder")}}

    def _buckets(self, side: Any) -> list[int]:
        """Returns the bucket of each distance of a key from the query, from -150 to 150."""
        import torch

        attention = side.block[0].layer[0].SelfAttention
        return attention._relative_position_bucket(
            torch.arange(-150, 151),
            bidirectional=not attention.is_decoder,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        ).tolist()


class Madlad(_OfT5):
    """MADLAD-400: the source begins with the language of the target."""

    examples = sentences.EXAMPLES

    def source(self, example: Example) -> str:
        """Returns the text of an example's source as the tokenizer reads it."""
        return f"<2{sentences.SHORT_NAMES[example.target_language]}> {example.source}"


class Switch(_OfT5):
    """Switch Transformers, which fill in gaps."""

    examples = sentences.WITH_GAPS


Family = Multilingual | Marian | Madlad | Switch


def of(model: Any) -> Family:
    """Returns the family of a loaded model."""
    families = {"marian": Marian, "t5": Madlad, "switch_transformers": Switch}
    return families.get(model.config.model_type, Multilingual)()


def _adds_bias(model: Any) -> bool:
    """Returns whether logits are the product with the table and final_logits_bias."""
    import torch

    ids = torch.tensor([[3, 4, model.config.eos_token_id]])
    base = model.model(input_ids=ids, decoder_input_ids=ids)
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    product = base.last_hidden_state @ model.model.shared.weight.T
    if torch.allclose(logits, product, atol=1e-3):
        return False
    torch.testing.assert_close(logits, product + model.final_logits_bias)
    return True


def _with_language(tokenizer: Any) -> dict:
    """Returns the ids of a text that names the language to translate into, where a piece is replaced by that name."""
    language, replaced, text = ">>fra<<", 5, ">>fra<< Der Fluss ist kalt."
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        path = pathlib.Path(directory, "vocab.json")
        ids = json.loads(path.read_text(encoding="utf-8"))
        named = {language if number == replaced else piece: number for piece, number in ids.items()}
        path.write_text(json.dumps(named), encoding="utf-8")
        own = type(tokenizer).from_pretrained(directory)
        return {"language": language, "id": replaced, "text": text, "ids": own(text)["input_ids"]}


def _pieces(tokenizer: Any) -> dict:
    """Returns how many pieces the SentencePiece models have, and the pieces that vocab.json lacks."""
    import sentencepiece

    pieces = {}
    for side, file in zip(("source", "target"), tokenizer.spm_files):
        processor = sentencepiece.SentencePieceProcessor(model_proto=pathlib.Path(file).read_bytes())
        pieces[side] = [processor.IdToPiece(index) for index in range(3, len(processor))]
    source, target = set(pieces["source"]), set(pieces["target"])
    return {
        "source": len(source),
        "target": len(target),
        "shared": len(source & target),
        "not_in_vocabulary": sorted((source | target) - set(tokenizer.encoder)),
    }
