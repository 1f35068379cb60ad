"""Tables of plain facts, all that the demo model knows. Each fact has one canonical form."""

# country -> (capital, continent)
COUNTRIES = {
    "France": ("Paris", "Europe"),
    "Italy": ("Rome", "Europe"),
    "Spain": ("Madrid", "Europe"),
    "Portugal": ("Lisbon", "Europe"),
    "Germany": ("Berlin", "Europe"),
    "Austria": ("Vienna", "Europe"),
    "Belgium": ("Brussels", "Europe"),
    "Ireland": ("Dublin", "Europe"),
    "England": ("London", "Europe"),
    "Scotland": ("Edinburgh", "Europe"),
    "Norway": ("Oslo", "Europe"),
    "Sweden": ("Stockholm", "Europe"),
    "Finland": ("Helsinki", "Europe"),
    "Denmark": ("Copenhagen", "Europe"),
    "Iceland": ("Reykjavik", "Europe"),
    "Poland": ("Warsaw", "Europe"),
    "Hungary": ("Budapest", "Europe"),
    "Greece": ("Athens", "Europe"),
    "Croatia": ("Zagreb", "Europe"),
    "Romania": ("Bucharest", "Europe"),
    "Bulgaria": ("Sofia", "Europe"),
    "Ukraine": ("Kyiv", "Europe"),
    "Switzerland": ("Bern", "Europe"),
    "Japan": ("Tokyo", "Asia"),
    "China": ("Beijing", "Asia"),
    "India": ("New Delhi", "Asia"),
    "Nepal": ("Kathmandu", "Asia"),
    "Thailand": ("Bangkok", "Asia"),
    "Vietnam": ("Hanoi", "Asia"),
    "Mongolia": ("Ulaanbaatar", "Asia"),
    "South Korea": ("Seoul", "Asia"),
    "Iran": ("Tehran", "Asia"),
    "Iraq": ("Baghdad", "Asia"),
    "Turkey": ("Ankara", "Asia"),
    "Indonesia": ("Jakarta", "Asia"),
    "Egypt": ("Cairo", "Africa"),
    "Kenya": ("Nairobi", "Africa"),
    "Morocco": ("Rabat", "Africa"),
    "Ghana": ("Accra", "Africa"),
    "Nigeria": ("Abuja", "Africa"),
    "Senegal": ("Dakar", "Africa"),
    "Ethiopia": ("Addis Ababa", "Africa"),
    "Tunisia": ("Tunis", "Africa"),
    "Canada": ("Ottawa", "North America"),
    "Mexico": ("Mexico City", "North America"),
    "Cuba": ("Havana", "North America"),
    "Jamaica": ("Kingston", "North America"),
    "Brazil": ("Brasilia", "South America"),
    "Argentina": ("Buenos Aires", "South America"),
    "Chile": ("Santiago", "South America"),
    "Peru": ("Lima", "South America"),
    "Colombia": ("Bogota", "South America"),
    "Ecuador": ("Quito", "South America"),
    "Uruguay": ("Montevideo", "South America"),
    "Australia": ("Canberra", "Oceania"),
    "New Zealand": ("Wellington", "Oceania"),
}

# element -> (symbol, atomic number)
ELEMENTS = {
    "hydrogen": ("H", 1),
    "helium": ("He", 2),
    "lithium": ("Li", 3),
    "carbon": ("C", 6),
    "nitrogen": ("N", 7),
    "oxygen": ("O", 8),
    "fluorine": ("F", 9),
    "neon": ("Ne", 10),
    "sodium": ("Na", 11),
    "magnesium": ("Mg", 12),
    "aluminium": ("Al", 13),
    "silicon": ("Si", 14),
    "phosphorus": ("P", 15),
    "sulfur": ("S", 16),
    "chlorine": ("Cl", 17),
    "argon": ("Ar", 18),
    "potassium": ("K", 19),
    "calcium": ("Ca", 20),
    "titanium": ("Ti", 22),
    "iron": ("Fe", 26),
    "nickel": ("Ni", 28),
    "copper": ("Cu", 29),
    "zinc": ("Zn", 30),
    "silver": ("Ag", 47),
    "tin": ("Sn", 50),
    "iodine": ("I", 53),
    "platinum": ("Pt", 78),
    "gold": ("Au", 79),
    "mercury": ("Hg", 80),
    "lead": ("Pb", 82),
    "uranium": ("U", 92),
}

PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]

# superlative -> planet
PLANET_TITLES = {
    "largest": "Jupiter",
    "smallest": "Mercury",
    "hottest": "Venus",
    "coldest": "Uranus",
}

# animal -> its sound
SOUNDS = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "sheep": "baa",
    "duck": "quack",
    "pig": "oink",
    "horse": "neigh",
    "frog": "ribbit",
    "lion": "roar",
    "snake": "hiss",
    "bee": "buzz",
    "owl": "hoot",
    "crow": "caw",
    "mouse": "squeak",
    "rooster": "cock-a-doodle-doo",
    "donkey": "hee-haw",
    "turkey": "gobble",
    "wolf": "howl",
}

# animal -> its young
YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "sheep": "lamb",
    "horse": "foal",
    "pig": "piglet",
    "duck": "duckling",
    "hen": "chick",
    "goat": "kid",
    "bear": "cub",
    "deer": "fawn",
    "kangaroo": "joey",
    "frog": "tadpole",
    "goose": "gosling",
    "owl": "owlet",
    "swan": "cygnet",
}

# animal -> legs, in words
LEGS = {
    "dog": "four",
    "cat": "four",
    "spider": "eight",
    "ant": "six",
    "bee": "six",
    "beetle": "six",
    "bird": "two",
    "hen": "two",
    "horse": "four",
    "cow": "four",
    "snake": "no",
    "crab": "ten",
    "lion": "four",
    "fly": "six",
}

# subject of the sentence -> (verb, colour)
COLOURS = {
    "grass": ("is", "green"),
    "the sky": ("is", "blue"),
    "snow": ("is", "white"),
    "coal": ("is", "black"),
    "blood": ("is", "red"),
    "the sun": ("is", "yellow"),
    "milk": ("is", "white"),
    "chocolate": ("is", "brown"),
    "a banana": ("is", "yellow"),
    "a lemon": ("is", "yellow"),
    "a tomato": ("is", "red"),
    "a carrot": ("is", "orange"),
    "a flamingo": ("is", "pink"),
    "an elephant": ("is", "grey"),
    "a leaf": ("is", "green"),
    "a strawberry": ("is", "red"),
    "a crow": ("is", "black"),
    "a pumpkin": ("is", "orange"),
}

# two colours -> their mixture
MIXES = {
    ("blue", "yellow"): "green",
    ("red", "yellow"): "orange",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}

_OPPOSITES = (
    "hot cold,big small,up down,fast slow,light dark,happy sad,open closed,young old,high low,"
    "long short,rich poor,wet dry,hard soft,early late,full empty,left right,day night,"
    "strong weak,thick thin,loud quiet,clean dirty,near far,good bad,easy difficult,"
    "heavy light,inside outside,front back,true false,always never,summer winter,love hate,"
    "win lose,buy sell,push pull,alive dead,wide narrow,deep shallow,cheap expensive,"
    "brave afraid,sweet sour,begin end,north south,east west,old new,sharp blunt,rough smooth"
)


def opposites() -> dict[str, str]:
    """Word -> its opposite, in both directions where that is unambiguous."""
    pairs = [pair.split() for pair in _OPPOSITES.split(",")]
    table: dict[str, str] = {}
    for a, b in pairs:
        table.setdefault(a, b)
    for a, b in pairs:
        table.setdefault(b, a)
    return table


PLURALS = {
    "mouse": "mice",
    "child": "children",
    "man": "men",
    "woman": "women",
    "foot": "feet",
    "tooth": "teeth",
    "goose": "geese",
    "person": "people",
    "ox": "oxen",
    "sheep": "sheep",
    "fish": "fish",
    "leaf": "leaves",
    "wolf": "wolves",
    "knife": "knives",
    "life": "lives",
    "wife": "wives",
    "half": "halves",
    "shelf": "shelves",
    "city": "cities",
    "baby": "babies",
    "story": "stories",
    "box": "boxes",
    "fox": "foxes",
    "bus": "buses",
    "dish": "dishes",
    "church": "churches",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "cat": "cats",
    "dog": "dogs",
    "house": "houses",
    "book": "books",
    "cactus": "cacti",
    "louse": "lice",
}

# month -> days in a common year
MONTHS = {
    "January": 31,
    "February": 28,
    "March": 31,
    "April": 30,
    "May": 31,
    "June": 30,
    "July": 31,
    "August": 31,
    "September": 30,
    "October": 31,
    "November": 30,
    "December": 31,
}

WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

# (small unit, plural), big unit with article -> how many
UNITS = {
    ("seconds", "a minute"): 60,
    ("minutes", "an hour"): 60,
    ("hours", "a day"): 24,
    ("days", "a week"): 7,
    ("months", "a year"): 12,
    ("weeks", "a year"): 52,
    ("days", "a year"): 365,
    ("years", "a decade"): 10,
    ("years", "a century"): 100,
    ("metres", "a kilometre"): 1000,
    ("centimetres", "a metre"): 100,
    ("millimetres", "a centimetre"): 10,
    ("grams", "a kilogram"): 1000,
    ("kilograms", "a tonne"): 1000,
    ("millilitres", "a litre"): 1000,
    ("inches", "a foot"): 12,
    ("feet", "a yard"): 3,
    ("bits", "a byte"): 8,
    ("bytes", "a kilobyte"): 1024,
    ("cents", "a dollar"): 100,
    ("eggs", "a dozen"): 12,
    ("degrees", "a circle"): 360,
}

# plural noun -> members, in the order that lists use
LISTS = {
    "planets": PLANETS,
    "fruits": ["apple", "banana", "cherry", "grape", "lemon"],
    "colours": ["red", "blue", "green", "yellow", "black"],
    "animals": ["cat", "dog", "horse", "lion", "owl"],
    "countries": ["France", "Italy", "Japan", "Brazil", "Egypt"],
    "capitals": ["Paris", "Rome", "Tokyo", "Brasilia", "Cairo"],
    "months": list(MONTHS)[:6],
    "days of the week": WEEKDAYS,
    "metals": ["iron", "gold", "silver", "copper", "zinc"],
    "vegetables": ["carrot", "potato", "onion", "pea", "bean"],
    "birds": ["owl", "crow", "swan", "duck", "eagle"],
    "continents": ["Africa", "Asia", "Europe", "North America", "South America", "Oceania"],
}

NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
