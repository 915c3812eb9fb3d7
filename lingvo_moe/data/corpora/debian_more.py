"""More Debian packages with many sentences for their size; the preset `debian_more`, which adds them to `debian`.

LibreOffice has a package of messages and one of help for each language. Of Spanish, Italian and Brazilian Portuguese,
they add 148,000 pairs of two words or more in 14 MB; the other applications add 163,000 in 77 MB.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import debian, debian_help
from lingvo_moe.data.corpora.sources import SourceList, register_source

# Chosen out of the applications of `pocket`: those that add at least 1400 such pairs for each megabyte.
APPLICATIONS = tuple(
    (
        "audacious-plugins-data audacity-data blender-data calligrasheets-data darktable evolution-data-server-common "
        "filezilla-common gnome-software-common gnupg-l10n gpodder kdeplasma-addons-data kdevelop-l10n kile-l10n "
        "ktorrent-data libc-l10n libglib2.0-data make nano network-manager-gnome phpmyadmin plasma-discover-common "
        "plasma-nm poedit-common postgresql-client-15 rkward-data shotwell-common system-config-printer-common tar "
        "tellico-data util-linux-locales weechat-core wget"
    ).split()
)
# LibreOffice's messages in the languages whose packages `debian` does not read, with Debian's spelling of the label.
_MESSAGES = {
    languages.normalize(suffix): f"libreoffice-l10n-{suffix}"
    for suffix in (
        "ar as ast be bg bn bs ca cs cy da de el eo es et eu fa fi fr gl gu he hi hr hu id is it ja km kn ko lt lv mk "
        "ml mr nb nl nn oc pa-in pl pt pt-br ro ru sk sl sr sv ta te th tr ug uk vi za zh-cn zh-tw"
    ).split()
}


def message_packages(selected: Collection[str] = ()) -> list[str]:
    """Returns LibreOffice's packages of messages that `debian` lacks, in the selected languages (empty: in all)."""
    return [package for language, package in _MESSAGES.items() if languages.is_selected(language, selected)]


@register_source("debian_more")
def debian_more_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """The preset `debian`, other applications, and LibreOffice's messages and help.

    Raises:
      UserError: as `debian.fetch_archives`.
    """
    catalogs = [*debian.packages(selected), *APPLICATIONS, *message_packages(selected)]
    pages = debian_help.office_packages(selected)
    names = [*catalogs, *pages]
    archives = debian.fetch_archives(cache, names)
    return SourceList(
        [
            *(debian.Package(archives[name], selected) for name in catalogs if name in archives),
            *debian_help.sources({name: archives[name] for name in pages if name in archives}, selected),
            debian.fetch_descriptions(cache, selected),
        ],
        [name for name in names if name not in archives],
    )
