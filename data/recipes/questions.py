"""Questions to sample answers to: templates in six kinds, and what passes of a question that a model wrote itself."""

from __future__ import annotations

import random
import re
from collections.abc import Callable


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(",")]


TOPICS = _items("""
    the seasons, the tides, lightning, fog, deserts, coral reefs, caves, rivers, soil, glaciers, earthquakes,
    volcanoes, the Moon, Saturn, comets, the Milky Way, black holes, space stations, telescopes, satellites,
    gravity, light, sound, atoms, magnets, electric motors, batteries, lasers, steel, glass, rubber, cement,
    plastic, soap, crystals, rust, cells, DNA, bones, the lungs, the heart, the skin, sleep, memory, fever,
    vaccines, vitamins, teeth, muscles, pain, bees, ants, spiders, octopuses, salmon, owls, penguins, bats,
    wolves, horses, elephants, dinosaurs, mushrooms, moss, apple trees, roses, potatoes, rice, wheat, coffee,
    tea, chocolate, cheese, bread, honey, salt, spices, soup, pasta, ancient Rome, ancient Egypt, the Vikings,
    the Silk Road, castles, the printing press, the steam engine, railways, the telephone, the radio, the
    internet, search engines, e-mail, passwords, encryption, databases, computer chips, robots, drones, machine
    learning, speech recognition, video games, spreadsheets, open source software, backups, taxes, loans,
    insurance, pensions, stock markets, budgets, trade, advertising, start-ups, contracts, trade unions,
    elections, courts, constitutions, the police, newspapers, museums, libraries, schools, universities, public
    parks, poetry, novels, theatre, opera, jazz, the guitar, drums, choirs, film making, photography, drawing,
    pottery, dance, football, tennis, swimming, climbing, sailing, chess, yoga, cycling, hiking, camping,
    fishing, gardening, knitting, Japan, Brazil, Kenya, Iceland, India, Paris, New York, the Alps, the Sahara,
    the Pacific Ocean, Antarctica, the Amazon, bridges, tunnels, dams, lighthouses, skyscrapers, airports,
    trams, bicycles, electric cars, ships, submarines, rockets, recycling, solar power, wind power, nuclear
    power, drinking water, clean air, farming, forests, oceans, noise, waste, friendship, patience, courage,
    honesty, curiosity, jealousy, anger, stress, motivation, teamwork, leadership, habits, job interviews,
    presentations, meetings, homework, exams, reading, handwriting, learning a language, time zones, maps,
    fractions, prime numbers, triangles, probability, averages, percentages, graphs, algebra, logic, infinity,
    zero, recursion, sorting, linked lists, hash tables, binary search, version control, unit tests, debugging,
    APIs, caching
""")

TEMPLATES: dict[str, list[str]] = {
    "chat": [
        "Hey, do you know anything about {}?",
        "I've been thinking about {} lately. What's your view?",
        "I'm new to {}. How would you begin?",
        "Can we talk about {} for a while?",
        "My sister is very interested in {}. What could I give her?",
        "I'm a little nervous about {}. Do you have any advice?",
        "What surprises most people about {}?",
        "Should I spend more time on {} or on {}?",
        "I have to give a talk about {} next week. Can you help me?",
        "Good evening! I'd like to hear something about {}.",
        "Someone told me that {} is boring. What would you answer?",
        "Thank you! Now tell me something about {}.",
    ],
    "explanation": [
        "Explain {} to a beginner.",
        "What exactly is meant by {}?",
        "Explain step by step what there is to know about {}.",
        "What have {} and everyday life to do with each other?",
        "Explain the connection between {} and {}.",
        "What is the history of {}?",
        "Compare {} with {}.",
        "Explain {} in one paragraph.",
        "What do experts still not know about {}?",
        "Give an overview of {} with examples.",
        "What has changed about {} over the last hundred years?",
        "What are common misunderstandings about {}?",
    ],
    "story": [
        "Write a short story in which {} plays a part.",
        "Tell me a story about a boy who knows everything about {}.",
        "Write a fairy tale that has to do with {}.",
        "Write a poem about {}.",
        "Write a funny story about {} and {}.",
        "Tell a story that begins with a letter about {}.",
        "Write a story about an old woman and {}.",
        "Write a conversation between two strangers about {}.",
        "Write the first page of an adventure novel about {}.",
        "Write a story with a surprising end about {}.",
        "Tell me a story about a small town and {}.",
        "Write a diary entry of someone who loves {}.",
    ],
    "list": [
        "Name five things everyone should know about {}.",
        "List the most important words that have to do with {}.",
        "Give me eight short facts about {}.",
        "What are the good and bad sides of {}?",
        "List six questions a child might ask about {}.",
        "Write a shopping list for someone who begins with {}.",
        "Give me four reasons to learn about {}.",
        "List the steps for planning a lesson about {}.",
        "What are seven mistakes to avoid with {}?",
        "List three similarities of {} and {}.",
        "Give me ten titles for an article about {}.",
        "Make a table of contents for a book about {}.",
    ],
}

LANGUAGES = ["Python"] * 6 + ["JavaScript", "JavaScript", "Java", "C", "C++", "Go", "Rust", "TypeScript", "SQL", "Bash"]
TASKS = _items("""
    reverses a list, adds two numbers, finds the smallest number in a list, counts the vowels in a word, checks
    if a number is even, computes a factorial, prints the first n square numbers, removes duplicates from a
    list, sorts words by length, joins a list of words with commas, converts kilometres to miles, converts a
    number to Roman numerals, checks a password, reads a text file and counts its words, writes a dictionary to
    a JSON file, splits a string at every space, tests whether a word is a palindrome, computes the greatest
    common divisor, finds all primes up to n, adds two matrices, draws a random card, simulates a coin toss,
    implements a stack, implements a queue, inserts a node into a linked list, walks a binary tree, computes the
    depth of a tree, searches a sorted list, sorts a list with insertion sort, merges two dictionaries, measures
    how long a function runs, retries a function three times, validates an e-mail address, parses a date, counts
    the days between two dates, downloads a web page, renders a list as HTML, draws a triangle of stars,
    computes compound interest, groups people by age, finds the most common letter in a text, encrypts a text
    with the Caesar cipher, rounds a price to cents, converts a temperature, solves a quadratic equation,
    shuffles a list, zips two lists, finds the longest line of a file, checks balanced brackets, computes
    Fibonacci numbers with a cache, models a bank account, models a library book, replaces every comma in a text
    by a semicolon, turns a list of names into initials, checks if a year is a leap year, adds up the even
    numbers of a list, compares two version numbers, prints the alphabet backwards, rotates a list by one place,
    counts how many lines of a file are empty, removes a key from a dictionary, picks the three largest numbers
    of a list, formats a number with thousands separators, tests if a point lies in a circle, flattens a list of
    lists, finds the most expensive product in a table, logs every call of a function, sums the digits of a
    number, swaps two variables, reads command line arguments, splits a list into chunks, returns the n-th line
    of a file
""")
CODE = [
    "Write a {} function that {}.",
    "Show me a short {} program that {}.",
    "I need {} code that {}. Please add comments.",
    "In {}, what is the simplest code that {}?",
    "Write {} code that {} and explain each line.",
    "Give me a {} example that {}, with a test.",
]

NAMES = ["Amir", "Bea", "Carlos", "Dina", "Elif", "Finn", "Grace", "Hugo", "Ines", "Jan", "Kim", "Lena"]
THINGS = ["pears", "stamps", "tickets", "bottles", "chairs", "shells", "plums", "cakes", "tiles", "buttons"]
SUMS: list[Callable[[random.Random, int, int, int, str, str], str]] = [
    lambda r, a, b, c, who, things: f"What is {a} + {b}?",
    lambda r, a, b, c, who, things: f"What is {a + b} minus {a}?",
    lambda r, a, b, c, who, things: f"Multiply {a} by {c}.",
    lambda r, a, b, c, who, things: f"How much is {a * c} / {c}?",
    lambda r, a, b, c, who, things: f"Add {a}, {b} and {c}.",
    lambda r, a, b, c, who, things: f"What is {r.choice((5, 10, 20, 40, 75))} percent of {20 * a}?",
    lambda r, a, b, c, who, things: f"{who} buys {a} {things} and later {b} more. How many {things} is that?",
    lambda r, a, b, c, who, things: f"{who} had {a + b} {things} and lost {b}. How many are left?",
    lambda r, a, b, c, who, things: f"There are {c} bags with {a} {things} in each. How many {things} are there?",
    lambda r, a, b, c, who, things: f"One of the {things} costs {c} dollars. What do {a} {things} cost?",
    lambda r, a, b, c, who, things: f"{who} divides {a * c} {things} among {c} children. How many does each child get?",
    lambda r, a, b, c, who, things: f"{who} walks {c} km a day. How far is that in {a} days?",
    lambda r, a, b, c, who, things: f"Find x: x + {a} = {a + b}.",
    lambda r, a, b, c, who, things: f"Find x: {c} * x = {a * c}.",
    lambda r, a, b, c, who, things: f"Which is larger, {a} or {b}? By how much?",
    lambda r, a, b, c, who, things: f"What is the mean of {a}, {a + c} and {a + 2 * c}?",
    lambda r, a, b, c, who, things: f"What are the area and the perimeter of a rectangle of {a} by {c}?",
    lambda r, a, b, c, who, things: f"What is {c} squared plus {a}?",
    lambda r, a, b, c, who, things: f"A film begins at {c} o'clock and lasts {a} minutes. When does it end?",
    lambda r, a, b, c, who, things: f"Count down from {c + 10} to {c}.",
]


def _question(kind: str, r: random.Random) -> str:
    if kind == "code":
        return r.choice(CODE).format(r.choice(LANGUAGES), r.choice(TASKS))
    if kind == "arithmetic":
        numbers = r.randint(3, 99), r.randint(3, 99), r.randint(2, 12)
        return r.choice(SUMS)(r, *numbers, r.choice(NAMES), r.choice(THINGS))
    template = r.choice(TEMPLATES[kind])
    return template.format(*r.sample(TOPICS, template.count("{}")))


KINDS = (*TEMPLATES, "code", "arithmetic")


def templated(n: int, seed: int) -> list[tuple[str, str]]:
    """Different questions as (kind, text): n / 6 of a kind, fewer where its templates give no more."""
    r = random.Random(seed)
    found: dict[str, tuple[str, str]] = {}
    for kind in KINDS:
        before = len(found)
        for _ in range(3 * n):
            if len(found) - before >= n // len(KINDS):
                break
            text = _question(kind, r)
            found.setdefault(key(text), (kind, text))
    return list(found.values())


def key(text: str) -> str:
    """The same for questions that differ in case, space and punctuation only."""
    return re.sub(r"[\W_]+", "", text.lower())


def usable(text: str) -> str | None:
    """A question that a model wrote itself, stripped; None: not worth an answer (hardly a word, or not in English)."""
    text = text.strip()
    english = sum(c.isascii() for c in text) >= 0.98 * len(text)
    return text if len(key(text)) >= 8 and english else None
