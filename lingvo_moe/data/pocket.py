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

from lingvo_moe.data import debian, debian_help, debian_more, mozilla, npm_packages, wheels
from lingvo_moe.data.sentence_source import Sentences
from lingvo_moe.data.sources import SourceList, register_source

LANGUAGES = tuple(
    (
        "ar ast be bg bs ca cs da de el eo es et eu fi fr gl he hr hu id it ja ko lt lv mk nb nl nn pl pt pt_BR ro ru "
        "sk sl sr sv tr uk vi zh_Hans zh_Hant"
    ).split()
)
# Each has between 300 and 20,000 sentences of three words or more.
_APPLICATIONS = tuple(
    (
        "anjuta-common apt aptitude-common audacious-plugins-data audacity-data bash blender-data calligra-data "
        "calligrasheets-data coreutils darktable dia-common dpkg epiphany-browser-data evolution-data-server-common "
        "filezilla-common gajim gedit-common gettext git gnome-builder gnome-shell-common gnome-software-common "
        "gnupg-l10n gparted-common gpodder grisbi-common gthumb-data inkscape k3b-i18n kdeconnect kdepim-runtime "
        "kdeplasma-addons-data kdevelop-l10n kdiff3 kile-l10n labplot-data libc-l10n libglib2.0-data libgtk-4-common "
        "lyx-common make mate-control-center-common mate-panel-common minetest-data mutt nano network-manager-gnome "
        "pan phpmyadmin pim-data-exporter plasma-discover-common plasma-nm pluma-common poedit-common "
        "postgresql-client-15 rhythmbox-data shotwell-common sudo synaptic system-config-printer-common tar "
        "tellico-data texinfo util-linux-locales weechat-core wesnoth-1.16-data wget"
    ).split()
)


@register_source("pocket")
def pocket_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """Debian packages, help pages, Mozilla's applications, all package descriptions, `pypi`, and npm packages."""
    read = selected or LANGUAGES
    office = debian_more.message_packages(read)
    packages = dict.fromkeys(
        [*debian.APPLICATIONS, *_APPLICATIONS, *debian_help.KDE_PACKAGES, *office]
    )  # kio is in two
    fetched = debian.fetch(cache, list(packages), read)
    pages = debian_help.fetch(cache, read)
    messages = mozilla.fetch(cache, read)
    descriptions = debian.Descriptions(cache.absolute() / "lists", read)
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
