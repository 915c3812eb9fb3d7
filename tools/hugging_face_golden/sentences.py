"""The sentences that train the tiny tokenizers, and the examples. They were written for this purpose.

It needs the standard library alone.
"""

from __future__ import annotations

import dataclasses

_ENGLISH = (
    "The water in the river is cold in the morning.",
    "She is reading a letter from her sister.",
    "We went to the market and bought bread, apples and cheese.",
    "Where is the station, and when does the next train leave?",
    "The children are playing in the garden behind the house.",
    "I would like a cup of tea with a little milk.",
    "It rained all night, so the road is wet.",
    "There are 12 chairs and 3 tables in this room.",
)
_FRENCH = (
    "L'eau de la rivière est froide le matin.",
    "Elle lit une lettre de sa sœur.",
    "Nous sommes allés au marché et nous avons acheté du pain, des pommes et du fromage.",
    "Où est la gare, et quand part le prochain train ?",
    "Les enfants jouent dans le jardin derrière la maison.",
    "Je voudrais une tasse de thé avec un peu de lait.",
    "Il a plu toute la nuit, donc la route est mouillée.",
    "Il y a 12 chaises et 3 tables dans cette pièce.",
)
_GERMAN = (
    "Das Wasser im Fluss ist am Morgen kalt.",
    "Sie liest einen Brief von ihrer Schwester.",
    "Wir gingen auf den Markt und kauften Brot, Äpfel und Käse.",
    "Wo ist der Bahnhof, und wann fährt der nächste Zug?",
    "Die Kinder spielen im Garten hinter dem Haus.",
    "Ich möchte eine Tasse Tee mit etwas Milch.",
    "Es hat die ganze Nacht geregnet, darum ist die Straße nass.",
    "In diesem Zimmer stehen 12 Stühle und 3 Tische.",
)
_RUSSIAN = (
    "Вода в реке утром холодная.",
    "Она читает письмо от своей сестры.",
    "Мы пошли на рынок и купили хлеб, яблоки и сыр.",
    "Где вокзал, и когда уходит следующий поезд?",
    "Дети играют в саду за домом.",
    "Я хотел бы чашку чая с молоком.",
    "Всю ночь шёл дождь, поэтому дорога мокрая.",
    "В этой комнате 12 стульев и 3 стола.",
)
_SWAHILI = (
    "Maji ya mto ni baridi asubuhi.",
    "Anasoma barua kutoka kwa dada yake.",
    "Tulikwenda sokoni tukanunua mkate, matofaa na jibini.",
    "Kituo kiko wapi, na treni inayofuata inaondoka lini?",
    "Watoto wanacheza katika bustani nyuma ya nyumba.",
    "Ningependa kikombe cha chai na maziwa kidogo.",
    "Mvua ilinyesha usiku wote, kwa hiyo barabara ina maji.",
    "Kuna viti 12 na meza 3 katika chumba hiki.",
)
TRAINING = (*_ENGLISH, *_FRENCH, *_GERMAN, *_RUSSIAN, *_SWAHILI)
# What Marian's tokenizers are trained on: one of German, and one of English.
GERMAN = (
    *_GERMAN,
    "Die Schwester der Kinder kaufte Brot und Milch auf dem Markt.",
    "Wann fährt der Zug am Morgen, und wo ist die Straße zum Bahnhof?",
    "Das Wasser im Garten ist kalt, und die Äpfel sind nass.",
    "Sie möchte im Haus lesen, wenn es in der Nacht regnet.",
    "Wir stehen hinter dem Garten und sehen den Fluss.",
    "Der Brief liegt auf dem Tisch im Zimmer.",
    "Es ist noch nicht hell, darum spielen die Kinder im Haus.",
    "Ein Stuhl und zwei Tische stehen am Fenster.",
)
ENGLISH = (
    *_ENGLISH,
    "The sister of the children bought bread and milk at the market.",
    "When does the train leave in the morning, and where is the road to the station?",
    "The water in the garden is cold, and the apples are wet.",
    "She would like to read in the house when it rains at night.",
    "We stand behind the garden and see the river.",
    "The letter lies on the table in the room.",
    "It is not light yet, so the children play in the house.",
    "A chair and two tables stand at the window.",
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A source and a target, with languages as NLLB names them."""

    source: str
    target: str
    source_language: str
    target_language: str


EXAMPLES = (
    Example("The river is cold.", "La rivière est froide.", "eng_Latn", "fra_Latn"),
    Example("Where is the garden?", "Wo ist der Garten?", "eng_Latn", "deu_Latn"),
    Example("Les enfants lisent à la maison.", "The children read at home.", "fra_Latn", "eng_Latn"),
    Example("Дети пошли в сад утром.", "Watoto walikwenda bustani asubuhi.", "rus_Cyrl", "swh_Latn"),
    # Characters that the tokenizer does not know, alone and in a row, with spaces about them.
    Example("Tea costs 5 ¥ or 水 茶水!", "Le thé coûte 5 ¥ ou 水 茶水 !", "eng_Latn", "fra_Latn"),
    # Spaces at both ends and in the middle.
    Example("  Das Brot   ist nass. ", " Хлеб  мокрый. ", "deu_Latn", "rus_Cyrl"),
    Example(".", ".", "swh_Latn", "fra_Latn"),
    Example(
        "We bought bread, apples and cheese at the market, and then it rained so the road to the house was wet.",
        "Wir kauften Brot, Äpfel und Käse auf dem Markt, und dann hat es geregnet.",
        "eng_Latn",
        "deu_Latn",
    ),
    Example("", "Non.", "eng_Latn", "fra_Latn"),
)
# Of a model that fills in gaps.
WITH_GAPS = (
    Example(
        "The <extra_id_0> cold in the <extra_id_1> and wet.",
        "<extra_id_0> river is <extra_id_1> garden <extra_id_2>",
        "eng_Latn",
        "eng_Latn",
    ),
    Example("<extra_id_0> read at <extra_id_9>", "<extra_id_0> The children <extra_id_1>", "eng_Latn", "eng_Latn"),
    *EXAMPLES,
)
# Of a model with one direction.
GERMAN_TO_ENGLISH = tuple(
    Example(source, target, "deu_Latn", "eng_Latn")
    for source, target in (
        ("Der Fluss ist kalt.", "The river is cold."),
        ("Wo ist der Garten?", "Where is the garden?"),
        # A letter that vocab.json lacks.
        ("Die Straße ist nass.", "The road is wet."),
        # Letters that only the tokenizer of the other side knows: x and y, and Ä.
        ("Der Typ x ist neu.", "The type Ä is new."),
        # Characters that no tokenizer knows, alone and in a row.
        ("Tee kostet 5 ¥ oder 水 茶水!", "Tea costs 5 ¥ or 水 茶水!"),
        # Characters that SentencePiece replaces: the umlaut of two characters, a space, an ellipsis and a ligature.
        ("Es ist ka\u0308lter\u00a0hier\u2026", "It is \ufb01ne\u00a0here\u2026"),
        # Spaces at both ends and in the middle.
        ("  Das Brot   ist nass. ", " The bread  is wet. "),
        (".", "."),
        (
            "Wir kauften Brot, Äpfel und Käse auf dem Markt, und dann kam der Zug in der Nacht zum Bahnhof am Fluss.",
            "We bought bread, apples and cheese at the market, and then the train came to the station at night.",
        ),
        ("", "No."),
    )
)

# M2M-100's names of the same languages.
SHORT_NAMES = {"eng_Latn": "en", "fra_Latn": "fr", "deu_Latn": "de", "rus_Cyrl": "ru", "swh_Latn": "sw"}
