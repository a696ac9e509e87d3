"""From what a request asks for to a grammar, within limits."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
from llguidance import LLMatcher, LLParserLimits

from jaxinfer.config import StructuredConfig
from jaxinfer.request import RequestError
from jaxinfer.structured.grammar import Grammar
from jaxinfer.structured.schema import SchemaError, prepare_schema
from jaxinfer.structured.spec import FIELD, StructuredOutputs
from jaxinfer.structured.vocabulary import Vocabulary
from jaxinfer.tokenization.tokenizer import Tokenizer

MAX_CACHED = 64
"""Compiled grammars kept, the last used ones."""
MAX_COMPILING = 2
"""Grammars that compile at the same time; each may go on for a while after its time is over."""
MAX_REPETITION = 10_000
"""Largest count of a repetition in an expression or grammar; automata of larger ones take seconds and much memory."""
MAX_REGEX_CHARS = 16_384
_COUNT = re.compile(r"(?:\{\s*(?:\d+\s*,\s*)?|~\s*(?:\d+\s*\.\.\s*)?)(\d{1,30})")
NOTHING_FITS = "no text satisfies it"
MAX_REASON = 300
"""Characters of llguidance's message that an error quotes."""

_LIMITS = LLParserLimits(verbose_errors=False, max_items_in_row=20_000, step_max_items=200_000)

WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between JSON tokens. Bounded: a weak model would write spaces for ever."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe; callers with an event loop or a step loop use a thread.

    llguidance bounds the work on a grammar by counting it, and cannot be interrupted; the time limit ends the
    waiting, not the work. A schema takes 1 to 2 ms as a rule.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], config: StructuredConfig
    ) -> None:
        self._source = (tokenizer, vocab_size, tuple(eos_token_ids))
        self._config = config
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_COMPILING)

    @property
    def vocabulary(self) -> Vocabulary:
        """Built at the first use, which takes up to a second."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._source)
            return self._vocabulary

    def check(self, spec: StructuredOutputs) -> None:
        """The quick part of ``compile``: sizes only.

        Raises:
            RequestError: the text is too long.
        """
        size = sum(len(text.encode()) for text in _texts(spec))
        if size > self._config.max_grammar_bytes:
            raise RequestError(
                f"{FIELD}.{spec.kind} has {size} bytes; allowed: at most {self._config.max_grammar_bytes}",
                FIELD,
            )
        for text in (spec.regex, spec.whitespace_pattern):
            if text is not None and len(text) > MAX_REGEX_CHARS:
                raise _refused(spec, f"an expression has at most {MAX_REGEX_CHARS} characters")
        for text in _texts(spec):
            for count in _COUNT.findall(text if spec.choice is None else ""):
                if int(count) > MAX_REPETITION:
                    raise _refused(
                        spec, f"it repeats something {count} times; allowed: at most {MAX_REPETITION}"
                    )

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """A grammar, from the cache if it was compiled lately.

        Raises:
            RequestError: it is too long, too complex, not satisfiable, or uses something that is not supported, which
                the message names.
        """
        self.check(spec)
        with self._lock:
            if spec in self._cache:
                self._cache.move_to_end(spec)
                return self._cache[spec]
        vocabulary = self.vocabulary
        grammar = self._in_time(spec, lambda: _compile(spec, vocabulary))
        with self._lock:
            self._cache[spec] = grammar
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def _in_time(self, spec: StructuredOutputs, work: Callable[[], Grammar]) -> Grammar:
        """Runs on a thread of its own. Not a daemon: at its exit a process has to wait for it, as native code cannot
        go on without the interpreter.
        """
        timeout = self._config.compile_timeout
        result: list[Grammar | RequestError] = []

        def run() -> None:
            try:
                result.append(work())
            except RequestError as error:
                result.append(error)
            except SchemaError as error:
                result.append(_refused(spec, str(error)))
            except BaseException as error:  # panics of native code too: strange input is the request's fault
                result.append(_refused(spec, f"{type(error).__name__}: {error}"))
            finally:
                self._places.release()

        if self._places.acquire(timeout=timeout):
            thread = threading.Thread(target=run, name="jaxinfer-grammar")
            thread.start()
            thread.join(timeout)
        if not result:
            raise _refused(spec, f"it is too complex: not compiled within {timeout:g} s")
        if isinstance(result[0], RequestError):
            raise result[0]
        return result[0]


def _compile(spec: StructuredOutputs, vocabulary: Vocabulary) -> Grammar:
    matcher = LLMatcher(vocabulary.ll, grammar_text(spec, vocabulary), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise _refused(spec, matcher.get_error())
    matcher.compute_bitmask()  # finds what is too complex, or empty, and is needed by every answer anyway
    if matcher.is_error():
        raise _refused(spec, matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        raise _refused(spec, NOTHING_FITS)
    return Grammar(vocabulary, matcher)


def grammar_text(spec: StructuredOutputs, vocabulary: Vocabulary) -> str:
    """What llguidance reads."""
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")  # a terminal is one automaton
    if spec.grammar is not None:
        return llguidance.grammar_from("grammar", spec.grammar)
    if spec.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_structural_tag(spec, vocabulary))
    schema = '{"type": "object"}' if spec.json is None else prepare_schema(str(spec.json))
    return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(spec))


def _json_options(spec: StructuredOutputs) -> Any:
    """A schema's own ``x-guidance`` may not loosen what is promised: that every answer validates."""
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if spec.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    return options | {
        "whitespace_flexible": True,
        "whitespace_pattern": spec.whitespace_pattern or WHITESPACE,
    }


def _structural_tag(spec: StructuredOutputs, vocabulary: Vocabulary) -> str:
    given = json.loads(str(spec.structural_tag))
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise _refused(spec, "'structures' and 'triggers' are needed, both lists that are not empty")
    tags = []
    for i, item in enumerate(structures):
        try:
            begin, end, schema = item["begin"], item["end"], item["schema"]
        except (TypeError, KeyError):
            raise _refused(spec, f"structures[{i}] needs 'begin', 'schema' and 'end'") from None
        trigger = next((t for t in triggers if isinstance(t, str) and t and str(begin).startswith(t)), None)
        if trigger is None or not isinstance(begin, str) or not isinstance(end, str):
            raise _refused(spec, f"structures[{i}].begin must be text that starts with one of the triggers")
        tag_schema = {**schema, "x-guidance": _json_options(spec)} if isinstance(schema, dict) else schema
        tags.append((trigger, begin, tag_schema, end))
    return _tag_grammar(tags, vocabulary)


def _tag_grammar(tags: list[tuple[str, str, Any, str]], vocabulary: Vocabulary) -> str:
    """Free text in which each trigger starts its structure. A trigger that is a special token is written by name."""
    rules = ["%llguidance {}", f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* tail"]
    rules += ["tail: TEXT", r"TEXT: /(.|\n)*/"]
    for i, (trigger, begin, schema, end) in enumerate(tags):
        rest = begin.removeprefix(trigger)
        body = f"{_literal(rest)} %json {json.dumps(schema, ensure_ascii=False)} {_literal(end)}"
        if trigger in vocabulary.special_texts:
            rules.append(f"tag_{i}: TEXT {trigger} {body}")
        else:
            rules.append(f"open_{i}[lazy]: /(.|\\n)*/ {_literal(trigger)}")
            rules.append(f"tag_{i}: open_{i} {body}")
    return "\n".join(rules)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _texts(spec: StructuredOutputs) -> list[str]:
    given = (spec.json, spec.regex, spec.grammar, spec.structural_tag, spec.whitespace_pattern)
    return [str(text) for text in given if text is not None] + list(spec.choice or ())


def _refused(spec: StructuredOutputs, reason: str) -> RequestError:
    reason = " ".join(reason.split())
    keywords = re.search(r"Unimplemented keys: \[(.*?)\]", reason)
    if reason.startswith("NoExtension"):
        reason = NOTHING_FITS
    elif keywords is not None:
        reason = f"it uses keywords that are not supported: {keywords[1].replace(chr(34), '')}"
    return RequestError(f"{FIELD}.{spec.kind} cannot be served: {reason[:MAX_REASON]}", FIELD)
