"""Help pages in Debian packages, sentence by sentence: LibreOffice's help, and GNOME's and KDE's manuals.

They are prose: LibreOffice's paragraphs have 13 words on average, the messages of programs 7.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import debian, help_pages
from lingvo_moe.data.corpora.sentence_source import Sentences
from lingvo_moe.data.corpora.sources import SourceList

NAME_SUFFIX = ", help pages"  # of a source's name, after that of its package
_OFFICE_ENGLISH = "libreoffice-help-en-us"
# libreoffice-help-sk has no page.
_OFFICE = {
    languages.normalize(suffix): f"libreoffice-help-{suffix}"
    for suffix in (
        "ca cs da de dz el es et eu fi fr gl hi hu id it ja km ko nl om pl pt pt-br ru sl sv tr vi zh-cn zh-tw"
    ).split()
}
_GNOME = tuple(
    (
        "accerciser anjuta-common brasero-common cheese-common deja-dup eog epiphany-browser-data evince-common "
        "evolution-common file-roller gedit-common gnome-boxes gnome-calculator gnome-chess gnome-sudoku "
        "gnome-system-monitor gnome-terminal-data gnome-user-docs gnote gthumb-data iagno orca seahorse "
        "shotwell-common simple-scan totem-common"
    ).split()
)

# Packages of KDE with a manual in English and in languages of `pocket`, which reads the catalogs of most of them, too.
# They were chosen out of Debian's 186 with a manual: those that add at least 2,000 pairs of three words or more to
# `pocket`, and at least 2,000 for each megabyte; and those whose catalogs were chosen before.
KDE_PACKAGES = tuple(
    (
        "akonadi-import-wizard akregator ark bluedevil calligraplan cantor cervisia choqok dolphin juk kajongg kalarm "
        "kalgebra-common kate5-data kbackup kblackbox kcachegrind kcalc kde-cli-tools-data kde-config-cron "
        "kde-config-tablet kde-spectacle kdenlive-data kdesvn kdiff3-doc keditbookmarks kexi-data kfind kfloppy "
        "kfourinline kgeotag kgoldrunner kgpg kid3 kig kile-doc killbots kimagemapeditor kinfocenter kio kio-audiocd "
        "kio-extras-data kjumpingcube kleopatra kmag kmail kmenuedit kmix kmouth kmplot kmymoney-common knotes kolf "
        "kompare konqueror konsole konsolekalendar kontact konversation-data korganizer krdc kreversi krusader kshisen "
        "ksirk ksudoku ksystemlog ktechlab ktimetracker ktorrent-data kturtle kubrick kwalletmanager kwave kwin-data "
        "kwordquiz kxstitch-common libkf5kdelibs4support-data lokalize lskat-data okteta okular palapeli-data "
        "partitionmanager plasma-desktop-data plasma-workspace-data powerdevil-data rkward-data rocs rsibreak "
        "skrooge-common step tellico-doc umbrello-data"
    ).split()
)


def fetch(cache: Path, selected: Collection[str] = ()) -> SourceList:
    """Returns the help pages of the selected languages (empty: of all), downloading what `cache` lacks.

    Raises:
      UserError: as `debian.fetch_archives`.
    """
    names = [*office_packages(selected), *_GNOME, *KDE_PACKAGES]
    archives = debian.fetch_archives(cache, names)
    return SourceList(sources(archives, selected), [name for name in names if name not in archives])


def office_packages(selected: Collection[str] = ()) -> list[str]:
    """Returns the packages of LibreOffice's help in the selected languages (empty: in all), the English one first."""
    office = [package for language, package in _OFFICE.items() if languages.is_selected(language, selected)]
    return [_OFFICE_ENGLISH, *office] if office else []


def sources(archives: Mapping[str, Path], selected: Collection[str] = ()) -> list[Sentences]:
    """Returns the help pages of packages, the paths of which are by name; LibreOffice's need the English package."""
    english = archives.get(_OFFICE_ENGLISH)
    office = set(_OFFICE.values())
    packages = [
        debian.Package(path, selected, help_pages.SUFFIXES, english if name in office else None)
        for name, path in archives.items()
        if name != _OFFICE_ENGLISH
    ]
    return [Sentences(package, f"{package.name}{NAME_SUFFIX}") for package in packages]
