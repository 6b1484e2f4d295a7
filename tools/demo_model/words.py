"""Holds the word lists and tables of facts from which every text of the corpus is built."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Animal:
    """What the corpus says about one animal, in every text alike."""

    name: str
    sound: str
    food: str
    home: str
    young: str


def _animal(name: str, sound: str, food: str, home: str, young: str) -> Animal:
    return Animal(name=name, sound=sound, food=food, home=home, young=young)


ANIMALS = (
    _animal("cow", "moo", "grass", "barn", "calf"),
    _animal("sheep", "baa", "clover", "meadow", "lamb"),
    _animal("dog", "woof", "bones", "yard", "puppy"),
    _animal("cat", "meow", "fish", "house", "kitten"),
    _animal("duck", "quack", "weeds", "pond", "duckling"),
    _animal("pig", "oink", "turnips", "sty", "piglet"),
    _animal("hen", "cluck", "corn", "coop", "chick"),
    _animal("owl", "hoot", "mice", "old tree", "owlet"),
    _animal("horse", "neigh", "hay", "stable", "foal"),
    _animal("frog", "croak", "flies", "pond", "tadpole"),
    _animal("lion", "roar", "meat", "den", "cub"),
    _animal("bear", "growl", "honey", "cave", "cub"),
    _animal("mouse", "squeak", "cheese", "hole", "pup"),
    _animal("goat", "bleat", "leaves", "hill", "kid"),
    _animal("bee", "buzz", "nectar", "hive", "larva"),
    _animal("crow", "caw", "seeds", "nest", "chick"),
    _animal("wolf", "howl", "meat", "den", "pup"),
    _animal("fox", "yip", "berries", "burrow", "kit"),
    _animal("donkey", "hee-haw", "thistles", "stable", "foal"),
    _animal("turkey", "gobble", "acorns", "yard", "poult"),
)

SHE_NAMES = (
    "Ada", "Bella", "Clara", "Daisy", "Elsa", "Fern", "Greta", "Hazel", "Iris", "Juno", "Kira", "Lotte",
    "Mia", "Nora", "Olive", "Pia", "Rosa", "Sally", "Tess", "Una", "Vera", "Willa", "Zoe", "Ruby", "Ivy",
    "Anna",
)  # fmt: skip
HE_NAMES = (
    "Adam", "Basil", "Caleb", "Dan", "Emil", "Felix", "Gus", "Hugo", "Ivan", "Jonas", "Kurt", "Leo",
    "Milo", "Ned", "Oscar", "Paul", "Quinn", "Rolf", "Sam", "Toby", "Victor", "Will", "Max", "Ben",
    "Otto", "Karl",
)  # fmt: skip

# a place and the things one sees there
PLACES = {
    "the forest": ("tall trees", "soft moss", "red mushrooms", "quiet paths"),
    "the beach": ("warm sand", "white shells", "green crabs", "blue waves"),
    "the market": ("ripe plums", "bright ribbons", "fresh bread", "round cheeses"),
    "the garden": ("yellow roses", "fat carrots", "busy bees", "stone steps"),
    "the lake": ("still water", "silver fish", "wooden boats", "long reeds"),
    "the castle": ("high towers", "old flags", "iron gates", "long halls"),
    "the school": ("big windows", "small desks", "new books", "loud bells"),
    "the farm": ("brown eggs", "muddy boots", "full barns", "green fields"),
    "the harbor": ("tall masts", "wet ropes", "noisy gulls", "bright lamps"),
    "the mountain": ("cold snow", "steep rocks", "small streams", "dark pines"),
    "the library": ("dusty shelves", "old maps", "soft chairs", "thick books"),
    "the bakery": ("hot rolls", "sweet cakes", "white flour", "big ovens"),
    "the mill": ("heavy sacks", "slow wheels", "yellow grain", "creaky doors"),
    "the river": ("smooth stones", "quick otters", "narrow bridges", "clear pools"),
    "the village": ("small houses", "kind neighbors", "narrow streets", "warm lights"),
    "the meadow": ("wild flowers", "tall grass", "tiny snails", "white clouds"),
}

# the preposition of a place where it is not `in`
PREPOSITIONS = {
    "the beach": "on", "the market": "at", "the lake": "at", "the school": "at", "the farm": "on",
    "the harbor": "at",
    "the mountain": "on", "the bakery": "at", "the mill": "at", "the river": "at",
}  # fmt: skip

THINGS = (
    "ball", "kite", "drum", "lantern", "basket", "bell", "book", "boat", "button", "candle", "clock",
    "coin", "cup", "doll", "feather", "flute", "hat", "key", "ladder", "letter", "map", "mirror",
    "puzzle", "ring", "rope", "scarf", "shell", "spoon", "stone",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "pink", "purple", "orange", "grey",
    "golden",
)  # fmt: skip
TRAITS = (
    "brave", "clever", "curious", "gentle", "happy", "honest", "kind", "lazy", "little", "lonely",
    "merry", "old", "proud", "quiet", "shy", "silly", "sleepy", "small", "strong", "young",
)  # fmt: skip
FOODS = (
    "apples", "beans", "berries", "bread", "butter", "carrots", "cheese", "cherries", "corn", "eggs",
    "figs", "grapes", "honey", "jam", "lemons", "melons", "milk", "mushrooms", "nuts", "oats", "onions",
    "peaches", "pears", "peas", "plums", "potatoes", "rice", "soup", "tea", "tomatoes",
)  # fmt: skip
WEATHER = ("sunny", "rainy", "windy", "cloudy", "snowy", "foggy", "warm", "cold")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Portugal": "Lisbon",
    "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Ireland": "Dublin",
    "Iceland": "Reykjavik",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Turkey": "Ankara", "Iran": "Tehran", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra",
    "Morocco": "Rabat", "Senegal": "Dakar", "Ethiopia": "Addis Ababa", "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Brazil": "Brasilia", "Ecuador": "Quito",
    "Australia": "Canberra",
}  # fmt: skip
CONTINENTS: dict[str, list[str]] = {
    "Europe": [
        "France", "Spain", "Italy", "Germany", "Portugal", "Greece", "Norway", "Sweden", "Finland",
        "Denmark", "Poland", "Austria", "Hungary", "Ireland", "Iceland",
    ],
    "Asia": ["Japan", "China", "India", "Thailand", "Vietnam", "Turkey", "Iran"],
    "Africa": ["Egypt", "Kenya", "Ghana", "Morocco", "Senegal", "Ethiopia"],
    "North America": ["Canada", "Mexico", "Cuba"],
    "South America": ["Peru", "Chile", "Brazil", "Ecuador"],
    "Australia": ["Australia"],
}  # fmt: skip
CONTINENT_OF = {country: continent for continent, countries in CONTINENTS.items() for country in countries}

COLOUR_OF = {
    "grass": "green", "snow": "white", "the sky": "blue", "coal": "black", "a lemon": "yellow",
    "a carrot": "orange",
    "a cherry": "red", "chocolate": "brown", "an elephant": "grey", "milk": "white", "a frog": "green",
    "a strawberry": "red", "the sun": "yellow", "a plum": "purple", "the night": "black", "the sea": "blue",
}  # fmt: skip
MIXED_COLOURS = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "day": "night", "wet": "dry", "old": "young",
    "open": "closed", "happy": "sad", "loud": "quiet", "full": "empty", "hard": "soft", "light": "dark",
    "high": "low", "early": "late", "near": "far",
}  # fmt: skip
LISTED = {
    "fruits": ("apple", "pear", "plum", "cherry", "grape", "lemon", "melon", "peach", "fig", "orange"),
    "colours": COLOURS[:11],
    "animals": tuple(animal.name for animal in ANIMALS),
    "tools": ("hammer", "saw", "drill", "spade", "rake", "brush", "file", "axe", "wrench", "ruler"),
    "clothes": ("shirt", "coat", "hat", "scarf", "sock", "shoe", "belt", "glove", "dress", "vest"),
    "vegetables": ("carrot", "onion", "potato", "bean", "pea", "cabbage", "leek", "turnip", "beet", "radish"),
    "instruments": ("drum", "flute", "harp", "violin", "piano", "trumpet", "guitar", "horn", "cello", "bell"),
    "trees": ("oak", "pine", "birch", "maple", "willow", "elm", "ash", "beech", "cedar", "palm"),
}
# mood or sky and its sign: a few characters that take several bytes in UTF-8
SIGNS = {
    "sunny": "☀", "rainy": "☂", "snowy": "❄", "cloudy": "☁", "happy": "😀", "sad": "😢", "sleepy": "😴",
    "in love": "❤", "hungry": "🍎", "musical": "🎵", "lucky": "🍀", "proud": "⭐",
}  # fmt: skip
CAFES = (
    "Café Été", "Café Zoë", "Bäckerei Müller", "Señor Niño", "Crêperie Noël", "Smörgås Åsa",
    "Pâtisserie Aimée",
)  # fmt: skip


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun or adjective, by its first sound."""
    return ("an " if noun[0] in "aeiou" or noun == "honest" else "a ") + noun


def joined(items: list[str]) -> str:
    """Write two or more items as an English list: `one, two, and three`."""
    if len(items) == 2:
        return f"{items[0]} and {items[1]}"
    return ", ".join(items[:-1]) + f", and {items[-1]}"
