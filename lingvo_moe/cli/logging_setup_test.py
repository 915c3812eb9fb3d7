"""Log lines of the command line: plain, on standard error, and only while a command runs."""

from __future__ import annotations

import logging

from lingvo_moe.cli import logging_setup

_logger = logging.getLogger("lingvo_moe.training.loop")


def test_messages_are_plain_lines_and_warnings_are_marked(capsys):
    """A user reads sentences, not timestamps and module names; debug messages are not for users."""
    with logging_setup.plain_lines():
        _logger.info("compiled in %d s", 3)
        _logger.warning("the disk is nearly full")
        _logger.debug("a detail")
    assert capsys.readouterr().err == "compiled in 3 s\nwarning: the disk is nearly full\n"


def test_configuration_ends_with_the_command():
    """A program that runs a command in its own process keeps its logging configuration."""
    logger = logging.getLogger("lingvo_moe")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with logging_setup.plain_lines():
        assert logger.handlers != before[2]
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_lines_are_printed_once_though_the_root_logger_has_a_handler(capsys, monkeypatch):
    """The library absl configures the root logger at its first message."""
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])
    with logging_setup.plain_lines():
        _logger.info("compiled")
    assert capsys.readouterr().err == "compiled\n"


def test_processes_other_than_the_primary_one_print_warnings_only(capsys):
    with logging_setup.plain_lines():
        logging_setup.warnings_only()
        _logger.info("compiled")
        _logger.warning("one checkpoint is corrupt")
    assert capsys.readouterr().err == "warning: one checkpoint is corrupt\n"


def test_libraries_do_not_repeat_errors_that_are_raised(caplog):
    """Orbax logs what it raises, asyncio the futures that Orbax drops; other records of these loggers are kept."""
    logging_setup.silence_libraries()
    absl, asyncio = logging.getLogger("absl"), logging.getLogger("asyncio")
    absl.handle(logging.LogRecord("absl", logging.ERROR, "/site-packages/orbax/checkpoint/x.py", 1, "orbax", (), None))
    absl.handle(logging.LogRecord("absl", logging.ERROR, "/site-packages/jax/x.py", 1, "jax", (), None))
    asyncio.error("Task exception was never retrieved")
    asyncio.error("slow callback")
    assert [record.getMessage() for record in caplog.records] == ["jax", "slow callback"]
