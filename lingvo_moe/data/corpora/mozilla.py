"""Firefox and Thunderbird in Debian: Fluent messages, in ZIP archives inside of packages.

Each language has a package; the English messages are in the application's own. What is read of them is kept in the
cache as `LANG.json`, since to unpack an application takes long. Messages in the applications' older formats
(.properties, .dtd) are not read.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import debian, fluent_catalogs, pinned
from lingvo_moe.data.corpora.sentence_source import Sentences
from lingvo_moe.data.corpora.sources import CatalogDirectory, Source, SourceList, combined_hash
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress, temporary_directories

_RULES_VERSION = 1  # of unpacking: increase it with every change of the rules, here and in `fluent_catalogs`
# The packages of the applications, and the languages of their `APPLICATION-l10n-LANGUAGE`.
_LANGUAGES = {
    "firefox-esr": (
        "ach af an ar ast az be bg bn br bs ca ca-valencia cak cs cy da de dsb el eo es-ar es-cl es-es es-mx et eu fa "
        "ff fi fr fur fy-nl ga-ie gd gl gn gu-in he hi-in hr hsb hu hy-am ia id is it ja ka kab kk km kn ko lij lt lv "
        "mk mr ms my nb-no ne-np nl nn-no oc pa-in pl pt-br pt-pt rm ro ru sat sc sco si sk skr sl son sq sr sv-se szl "
        "ta te tg th tl tr trs uk ur uz vi xh zh-cn zh-tw"
    ).split(),
    "thunderbird": (
        "af ar ast be bg br ca cak cs cy da de dsb el es-ar es-es es-mx et eu fi fr fy-nl ga-ie gd gl he hr hsb hu "
        "hy-am id is it ja ka kab kk ko lt lv ms nb-no nl nn-no pa-in pl pt-br pt-pt rm ro ru sk sl sq sr sv-se th tr "
        "uk uz vi zh-cn zh-tw"
    ).split(),
}
_ZIP_SUFFIXES = (".ja", ".xpi")
_MEMBER = re.compile(r"(?:.*/)?localization/(?P<label>[\w-]+)/(?P<name>.+\.ftl)")
_ENGLISH = "en-US"


def fetch(cache: Path, selected: Collection[str] = ()) -> SourceList:
    """Returns the messages of the selected languages (empty: of all), downloading what `cache` lacks.

    Raises:
      UserError: as `debian.fetch_archives`, or an archive in a package is damaged.
    """
    by_application = {application: _language_packages(application, selected) for application in _LANGUAGES}
    names = [name for application, packages in by_application.items() if packages for name in (application, *packages)]
    if not names:
        return SourceList([])
    archives = debian.fetch_archives(cache, names)
    sources = [
        _messages(cache, archives[application], [archives[name] for name in packages if name in archives], selected)
        for application, packages in by_application.items()
        if application in archives
    ]
    return SourceList(sources, [name for name in names if name not in archives])


def _language_packages(application: str, selected: Collection[str]) -> list[str]:
    return [
        f"{application}-l10n-{language}"
        for language in _LANGUAGES[application]
        if languages.is_selected(languages.normalize(language), selected)
    ]


def _messages(cache: Path, application: Path, packages: Sequence[Path], selected: Collection[str]) -> Source:
    paths = [application, *packages]
    hashes = combined_hash((path.name, path) for path in paths)
    directory = cache / f"{application.name.partition('_')[0]}-{hashes[:12]}-{_RULES_VERSION}"
    pinned.complete_directory(directory, lambda partial: _unpack(paths, partial))
    # The English file decides the content, too, and has no pairs of its own.
    read = {*selected, "en"} if selected else ()
    return Sentences(CatalogDirectory(application.name, directory, (".json",), read))


def _unpack(packages: Sequence[Path], directory: Path):
    """Writes the texts of all packages, a file for each language."""
    for package in progress.track(packages, f"reading messages of {packages[0].name}", unit="packages"):
        try:
            by_label = _texts(package)
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:
            raise UserError(
                f"{package}: its messages are not readable ({error}). Delete it and run the same command again."
            ) from None
        if not by_label:
            raise UserError(
                f"{package}: expected Fluent files, localization/LANG/*.ftl, in a ZIP archive in it; there is none. "
                "This reader is for the packages of Debian 12; use --preset=debian."
            )
        for label, texts in by_label.items():
            path = directory / f"{'en' if label == _ENGLISH else languages.normalize(label)}.json"
            path.write_text(json.dumps(texts), encoding="utf-8")


def _texts(package: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Returns the texts of a package by the label of their language, file and message."""
    files: dict[str, dict[str, str]] = {}
    with temporary_directories.make("unpacked-", package.parent) as directory:
        debian.unpack(package, directory)
        for path in sorted(directory.rglob("*")):
            if path.suffix in _ZIP_SUFFIXES and path.is_file() and not path.is_symlink():
                for match, content in _members(path):
                    files.setdefault(match["label"], {})[match["name"]] = content
    return {label: fluent_catalogs.texts(contents) for label, contents in files.items()}


def _members(path: Path) -> Iterator[tuple[re.Match[str], str]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            match = _MEMBER.fullmatch(name)
            if match and (match["label"] == _ENGLISH or languages.normalize(match["label"])):
                yield match, archive.read(name).decode("utf-8-sig")
