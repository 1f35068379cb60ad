"""Tool families in the OpenAI function format: schemas under many names, calls, and results.

A family has several names and parameter names, so that the model reads the schema in the prompt
instead of memorising one.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from demo.people import NAMES, any_city, invented_word
from demo.writing import repeatable_text

CURRENCIES = ["USD", "EUR", "GBP", "JPY", "SEK", "NOK", "CHF", "INR", "CAD", "AUD"]
_CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear"]
_STOCKS = [
    "AAPL",
    "MSFT",
    "NVDA",
    "AMD",
    "TSLA",
    "GOOG",
    "AMZN",
    "INTC",
    "META",
    "IBM",
    "ORCL",
    "SAP",
]
_LANGUAGES = ["French", "German", "Spanish", "Italian", "Swedish", "Dutch", "Latin", "Greek"]


@dataclass(frozen=True)
class Param:
    """One parameter of a family: its possible names, JSON type and possible descriptions."""

    names: tuple[str, ...]
    type: str
    descriptions: tuple[str, ...]


@dataclass(frozen=True)
class ToolFamily:
    """One kind of tool.

    `draw` returns slot values by parameter position and extra slots for the question; `result`
    returns the tool's output and the assistant's sentence about it.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[Param, ...]
    ask: tuple[str, ...]
    held_out: tuple[str, ...]
    draw: Callable[[random.Random], dict]
    result: Callable[[dict, random.Random], tuple[object, str]]
    follow_ups: tuple[str, ...] = ()
    optional: dict[str, dict] = field(default_factory=dict)  # sometimes in the schema, never filled


@dataclass(frozen=True)
class Tool:
    """A family under concrete names, as it appears in one conversation."""

    family: ToolFamily
    name: str
    keys: tuple[str, ...]
    schema: dict

    def arguments(self, values: dict) -> dict:
        """The call's arguments: drawn values under this tool's parameter names, in order."""
        return dict(zip(self.keys, values["args"], strict=True))


def make_tool(family: ToolFamily, rng: random.Random) -> Tool:
    """Choose names and wording, and write the schema."""
    name = rng.choice(family.names)
    keys = tuple(rng.choice(p.names) for p in family.params)
    properties = {}
    for key, param in zip(keys, family.params, strict=True):
        properties[key] = {"type": param.type}
        if rng.random() < 0.5:
            properties[key]["description"] = rng.choice(param.descriptions)
    shows_optional = bool(family.optional) and rng.random() < 0.3
    if shows_optional:
        properties |= family.optional
    function: dict = {"name": name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(family.descriptions)
    function["parameters"] = {"type": "object", "properties": properties}
    if shows_optional or rng.random() < 0.8:
        function["parameters"]["required"] = list(keys)
    schema = {"type": "function", "function": function}
    if rng.random() < 0.15:
        schema = json.loads(json.dumps(schema, sort_keys=True))
    return Tool(family, name, keys, schema)


def _weather(rng: random.Random) -> dict:
    city = any_city(rng)
    return {"args": [city], "city": city}


def _weather_result(values: dict, rng: random.Random) -> tuple[object, str]:
    degrees, sky, city = rng.randint(-9, 39), rng.choice(_CONDITIONS), values["city"]
    shown = rng.choice(
        [
            {"temperature": degrees, "condition": sky},
            {"city": city, "temperature": degrees, "condition": sky},
            {"temperature": degrees, "unit": "celsius", "condition": sky},
            {"condition": sky, "temperature": degrees},
            {"temp": degrees, "weather": sky},
            f"{sky}, {degrees} degrees",
            f"{degrees} degrees and {sky}",
        ]
    )
    return shown, f"It is {sky} and {degrees} degrees in {city}."


def _time_result(values: dict, rng: random.Random) -> tuple[object, str]:
    time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    shown = rng.choice([{"time": time}, time, {"city": values["city"], "time": time}])
    return shown, f"It is {time} in {values['city']}."


def _two_numbers(rng: random.Random) -> dict:
    top = rng.choice([20, 100, 1000, 10000])
    a, b = rng.randint(0, top), rng.randint(0, top)
    return {"args": [a, b], "a": str(a), "b": str(b)}


def _expression(rng: random.Random) -> dict:
    numbers = _two_numbers(rng)
    sign, word = rng.choice([("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")])
    a, b = numbers["a"], numbers["b"]
    shown = f"{a} {sign} {b}" if rng.random() < 0.7 else f"{a} {word} {b}"
    return {"args": [f"{a} {sign} {b}"], "sum": shown}


def _number_result(values: dict, rng: random.Random) -> tuple[object, str]:
    number = rng.choice([rng.randint(0, 99999), rng.randint(0, 999), rng.randint(0, 9999) / 100])
    shown = rng.choice([{"result": number}, str(number), number, {"value": number}])
    return shown, f"The result is {number}."


def _exchange(rng: random.Random) -> dict:
    amount = rng.choice([rng.randint(1, 100), rng.randint(1, 5000), 100, 10, 50])
    source, target = rng.sample(CURRENCIES, 2)
    return {
        "args": [amount, source, target],
        "amount": str(amount),
        "source": source,
        "target": target,
    }


def _exchange_result(values: dict, rng: random.Random) -> tuple[object, str]:
    worth = rng.choice([rng.randint(1, 9999), rng.randint(1, 99999) / 100])
    target = values["target"]
    shown = rng.choice(
        [{"result": worth}, {"amount": worth, "currency": target}, str(worth), {"converted": worth}]
    )
    return shown, f"{values['amount']} {values['source']} is {worth} {target}."


def _timer(rng: random.Random) -> dict:
    n = rng.randint(2, 90)
    return {"args": [n], "n": str(n)}


def _timer_result(values: dict, rng: random.Random) -> tuple[object, str]:
    return _success_result(rng), f"The timer is set for {values['n']} minutes."


def _search(rng: random.Random) -> dict:
    query = repeatable_text(rng)
    return {"args": [query], "query": query}


def _search_result(values: dict, rng: random.Random) -> tuple[object, str]:
    text = repeatable_text(rng)
    shown = rng.choice([{"results": [text]}, {"result": text}, text])
    return shown, f"I found this: {text}"


def _message(rng: random.Random) -> dict:
    name, text = rng.choice(NAMES), repeatable_text(rng)
    return {"args": [name, text], "name": name, "text": text}


def _message_result(values: dict, rng: random.Random) -> tuple[object, str]:
    return _success_result(rng), f"The message to {values['name']} is sent."


def _stock(rng: random.Random) -> dict:
    symbol = rng.choice(_STOCKS)
    return {"args": [symbol], "symbol": symbol}


def _stock_result(values: dict, rng: random.Random) -> tuple[object, str]:
    price = rng.randint(100, 99999) / 100
    shown = rng.choice([{"price": price}, {"symbol": values["symbol"], "price": price}, str(price)])
    return shown, f"The price of {values['symbol']} is {price}."


def _translate(rng: random.Random) -> dict:
    text, language = repeatable_text(rng), rng.choice(_LANGUAGES)
    return {"args": [text, language], "text": text, "language": language}


def _translate_result(values: dict, rng: random.Random) -> tuple[object, str]:
    words = " ".join(invented_word(rng) for _ in range(rng.randint(1, 3)))
    shown = rng.choice([{"translation": words}, {"text": words}, words])
    return shown, f"In {values['language']} it is: {words}"


def _success_result(rng: random.Random) -> object:
    return rng.choice([{"status": "ok"}, "ok", {"success": True}, {"status": "done"}, "done"])


_CITY = ("The name of the city.", "City name, for example Paris", "Which city", "The city")

FAMILIES: dict[str, ToolFamily] = {
    "weather": ToolFamily(
        ("get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather"),
        ("Get the weather in a city.", "Current weather for a place", "Look up the weather."),
        (Param(("city", "city", "location", "place", "town"), "string", _CITY),),
        (
            "(What is|What's|How is|How's) the weather (in|like in) {city}( today| now|)?",
            "(Tell me|Check|Look up|Get|Show me) the weather (in|for) {city}(.|)",
            "(Is it|Will it be) (sunny|raining|cold|warm|hot|windy) in {city}( today|)?",
            "(Can|Could) you (check|look up|tell me) the weather (in|for) {city}?",
            "(weather in|weather for|the weather in) {city}(?|)",
            "How (warm|cold|hot) is it in {city}( today| now|)?",
            "(What is|What's) the temperature in {city}?",
            "Do I need (an umbrella|a coat) in {city}( today|)?",
            "I am (going to|in) {city}. (How is|What is) the weather( there|)?",
        ),
        (
            "Please tell me how the weather is in {city}.",
            "I want to know the weather in {city} right now.",
        ),
        _weather,
        _weather_result,
        ("(And|What about|How about) (in |){city}?", "(And the weather|Now|Also) in {city}(?|)"),
        {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    ),
    "time": ToolFamily(
        ("get_time", "get_time", "get_current_time", "current_time", "clock"),
        ("Get the time in a city.", "Current local time of a place", "Tell the time."),
        (Param(("city", "city", "location", "place"), "string", _CITY),),
        (
            "(What is|What's) the (time|local time) in {city}( now|)?",
            "What time is it (in|over in) {city}( now|)?",
            "(Tell me|Check|Look up|Get) the (time|local time|current time) in {city}(.|)",
            "(Can|Could) you (check|tell me) (the time|what time it is) in {city}?",
            "(time in|current time in) {city}(?|)",
            "How late is it in {city}( now|)?",
        ),
        ("Please tell me what time it is in {city}.",),
        _weather,
        _time_result,
        ("(And|What about|How about) (in |){city}?",),
    ),
    "add": ToolFamily(
        ("add", "add", "add_numbers", "sum", "plus"),
        ("Add two numbers.", "Returns the sum of two numbers"),
        (
            Param(("a", "a", "x", "first"), "number", ("First number",)),
            Param(("b", "b", "y", "second"), "number", ("Second number",)),
        ),
        (
            "(What is|What's|How much is) {a} (+|plus|and) {b}?",
            "(Add|Sum) {a} and {b}(.|)",
            "{a} (+|plus) {b}( =|?|)",
            "(Calculate|Compute|Work out) {a} (+|plus) {b}(.|)",
            "(What is|Tell me) the sum of {a} and {b}(?|.)",
            "(Use the tool to add|Please add) {a} (and|to) {b}(.|)",
        ),
        ("Could you tell me how much {a} plus {b} is?",),
        _two_numbers,
        _number_result,
        ("(And|What about) {a} (+|plus) {b}?",),
    ),
    "calculator": ToolFamily(
        ("calculator", "calculator", "calculate", "evaluate", "compute"),
        ("Evaluate an arithmetic expression.", "A simple calculator", "Do sums."),
        (Param(("expression", "expression", "expr", "formula"), "string", ("The sum to do",)),),
        (
            "(What is|What's|How much is) {sum}?",
            "(Calculate|Compute|Work out|Evaluate) {sum}(.|)",
            "{sum}( =|?|)",
            "(Can|Could) you (calculate|compute|work out) {sum}?",
            "(Use the calculator for|Tell me|I need) {sum}(.|)",
        ),
        ("Please use your calculator to work out {sum}.",),
        _expression,
        _number_result,
        ("(And|What about) {sum}?",),
    ),
    "exchange": ToolFamily(
        ("convert_currency", "convert_currency", "exchange", "currency_converter", "convert"),
        ("Convert money between currencies.", "Currency conversion at today's rate"),
        (
            Param(("amount", "amount", "value"), "number", ("How much money",)),
            Param(("from", "from_currency", "source"), "string", ("Currency code to sell",)),
            Param(("to", "to_currency", "target"), "string", ("Currency code to buy",)),
        ),
        (
            "(Convert|Change|Exchange) {amount} {source} (to|into) {target}(.|)",
            "(What is|What's|How much is) {amount} {source} in {target}?",
            "How (much|many) {target} (is|are|do I get for) {amount} {source}?",
            "(Can|Could) you (convert|change) {amount} {source} (to|into) {target}?",
            "{amount} {source} (in|to) {target}(?|)",
        ),
        ("Please tell me how much {amount} {source} is in {target}.",),
        _exchange,
        _exchange_result,
        ("(And|What about) {amount} {source} (in|to) {target}?",),
    ),
    "timer": ToolFamily(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer.", "Start a countdown in minutes"),
        (Param(("minutes", "minutes", "duration"), "integer", ("Minutes to wait",)),),
        (
            "(Set|Start|Make) a timer (for|of) {n} minutes(.|)",
            "(Can|Could) you (set|start) a timer for {n} minutes?",
            "(Remind me in|Wake me in|Timer for|Timer:) {n} minutes(.|)",
            "(Set|Start) a {n} minute timer(.|)",
        ),
        ("I need a timer for {n} minutes, please.",),
        _timer,
        _timer_result,
    ),
    "search": ToolFamily(
        ("search", "web_search", "search_web"),
        ("Search the web.", "Find pages about a query"),
        (Param(("query", "query", "q", "text"), "string", ("What to look for",)),),
        (
            "(Search|Search the web|Look) for {query}",
            "(Find|Google|Look up|Search) {query}",
            "(Can|Could) you (search|look) for {query}",
        ),
        ("Please search the web for {query}",),
        _search,
        _search_result,
        optional={"limit": {"type": "integer"}},
    ),
    "message": ToolFamily(
        ("send_message", "send_email", "text_person"),
        ("Send a message to a person.", "Write to somebody"),
        (
            Param(("to", "recipient", "name"), "string", ("Who gets it",)),
            Param(("text", "body", "message"), "string", ("What to say",)),
        ),
        (
            "(Send|Write) a message to {name}: {text}",
            "(Text|Tell|Email) {name}: {text}",
            "(Can you|Please) (send|write) {name} this: {text}",
        ),
        ("I want to send this message to {name}: {text}",),
        _message,
        _message_result,
    ),
    "stock": ToolFamily(
        ("get_stock_price", "stock_price", "quote"),
        ("Get the price of a stock.", "Latest price for a ticker symbol"),
        (Param(("symbol", "ticker"), "string", ("Ticker symbol",)),),
        (
            "(What is|What's) the (price|stock price) of {symbol}?",
            "(Tell me|Check|Get|Look up) the (price|stock price) of {symbol}(.|)",
            "How much is (a share of |){symbol}( stock|)( now|)?",
            "{symbol} (stock price|price)(?|)",
        ),
        ("Please tell me the stock price of {symbol}.",),
        _stock,
        _stock_result,
        ("(And|What about) {symbol}?",),
    ),
    "translate": ToolFamily(
        ("translate", "translate_text"),
        ("Translate a text.", "Translate words into another language"),
        (
            Param(("text", "text", "phrase"), "string", ("What to translate",)),
            Param(("language", "target", "to"), "string", ("Target language",)),
        ),
        (
            "Translate {text} (to|into) {language}(.|)",
            '(Translate|Put) "{text}" into {language}(.|)',
            "(How do you say|What is) {text} in {language}?",
        ),
        ('Please translate "{text}" into {language}.',),
        _translate,
        _translate_result,
    ),
}
