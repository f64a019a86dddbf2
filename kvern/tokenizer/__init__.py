"""Between text, chat messages and token ids. No torch."""

from kvern.tokenizer.base import Tokenizer
from kvern.tokenizer.byte_tokenizer import ByteTokenizer
from kvern.tokenizer.chat_template import render_chat
from kvern.tokenizer.load import load_tokenizer

__all__ = ["ByteTokenizer", "Tokenizer", "load_tokenizer", "render_chat"]
