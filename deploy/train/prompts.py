"""Prompts to have the target answer: 8 categories, drawn from templates, topics and passages by a seed.

Pure. Topics and passages are split by a digest into those to train on and those to evaluate on, so that no
evaluation prompt shares its subject with the training.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Split = Literal["train", "eval"]
CATEGORIES = ("chat", "explain", "code", "math", "summarise", "edit", "creative", "extract")
_EVAL_SHARE = 16
"""One topic or passage in so many is kept for evaluation."""

_TOPICS = """\
photosynthesis; black holes; inflation in economics; the water cycle; vaccines; plate tectonics; compound
interest; machine learning; the French Revolution; the Roman Empire; jazz music; chess openings; sourdough
bread; solar panels; electric cars; the stock market; meditation; the immune system; DNA replication;
quantum computers; the Silk Road; volcanoes; coral reefs; honey bees; public transport; renewable energy;
the printing press; the Cold War; haiku; the Olympic Games; photography; gardening in small spaces; home
composting; bicycle maintenance; marathon training; budgeting for students; job interviews; public speaking;
remote work; time management; learning a new language; raising a puppy; aquarium care; houseplants;
knitting; woodworking; watercolour painting; playing the guitar; piano practice; reading sheet music; film
editing; podcasts; blogging; writing a novel; poetry; Shakespeare; Greek mythology; Norse mythology; fairy
tales; science fiction; detective stories; maps; the Moon; Mars; comets; telescopes; satellites; airplanes;
helicopters; submarines; bridges; skyscrapers; concrete; steel; glass; paper; batteries; lasers; magnets;
radio; television; the internet; email; encryption; passwords; firewalls; databases; spreadsheets; operating
systems; compilers; sorting algorithms; binary search; recursion; hash tables; graphs; regular expressions;
unit tests; version control; web servers; REST services; JSON; caching; load balancing; neural networks;
decision trees; linear regression; probability; statistics; geometry; algebra; calculus; prime numbers;
fractions; percentages; triangles; circles; vectors; matrices; logarithms; exponents; gravity; friction;
energy; electricity; sound waves; light; colour; heat; pressure; atoms; molecules; acids and bases; metals;
plastics; crystals; cells; bacteria; viruses; fungi; trees; flowers; insects; birds; whales; dolphins;
elephants; wolves; cats; dogs; horses; penguins; sharks; spiders; snakes; dinosaurs; evolution; ecosystems;
rainforests; deserts; oceans; rivers; lakes; mountains; glaciers; hurricanes; tornadoes; earthquakes;
climate change; recycling; air pollution; clean water; nutrition; vitamins; sleep; exercise; yoga; swimming;
football; basketball; tennis; cricket; baseball; skiing; hiking; camping; travel to Japan; travel to Italy;
travel to Brazil; visiting museums; train journeys; packing light; coffee; tea; chocolate; cheese; pasta;
pizza; soup; salads; breakfast; baking cakes; spices; rice; potatoes; tomatoes; apples; wine; farming;
irrigation; soil; wheat; sheep; fishing; forestry; mining; factories; trade; money; banks; taxes; insurance;
credit scores; mortgages; retirement savings; small businesses; marketing; customer service; leadership;
teamwork; negotiation; conflict resolution; friendship; kindness; courage; honesty; patience; gratitude;
happiness; stress; memory; attention; habits; motivation; creativity; curiosity; education; universities;
libraries; homework; exams; scholarships; democracy; elections; constitutions; human rights; courts; laws;
police; the United Nations; immigration; cities; villages; architecture; gardens; fashion; textiles;
jewellery; pottery; sculpture; theatre; opera; ballet; folk songs; drums; violins; the Renaissance; the
Middle Ages; ancient Egypt; the Aztecs; the Vikings; samurai; pirates; explorers; railways; steam engines;
the Industrial Revolution; the First World War; the space race; the Great Wall of China; the Eiffel Tower;
clocks; calendars; alphabets; numbers; measuring units; robots; drones; video games; virtual reality;
smartphones; cameras; wearable devices; medicine; surgery; dentists; hospitals; first aid; allergies; the
heart; the brain; the lungs; the skin; bones; muscles; blood; hormones; genes; twins; ageing; games for
children; board games; puzzles; riddles; magic tricks; jokes; birthdays; weddings; holidays; festivals;
cooking for one; saving electricity; moving house; renting a flat; first cars"""

_NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Marco",
    "Nadia",
    "Omar",
    "Priya",
]
_THINGS = [
    "apples",
    "pencils",
    "tickets",
    "marbles",
    "books",
    "cookies",
    "coins",
    "stickers",
    "boxes",
    "bottles",
    "cards",
    "eggs",
]

_CHAT = (
    "What do you think about {t}?",
    "Can you give me some advice about {t}?",
    "I am new to {t}. Where should I start?",
    "Tell me something surprising about {t}.",
    "What are the pros and cons of {t}?",
    "Hi! I would like to talk about {t}.",
    "Give me five tips on {t}.",
    "What questions should I ask an expert on {t}?",
    "Why do people care about {t}?",
    "My friend {n} keeps talking about {t}. What should I know?",
    "Recommend three ways to learn more about {t}.",
    "How has {t} changed over the last century?",
)
_EXPLAIN = (
    "Explain {t} to a ten-year-old.",
    "Explain how {t} works, step by step.",
    "What is {t}?",
    "Why is {t} important?",
    "Describe the main ideas behind {t} in two paragraphs.",
    "What is the difference between {t} and {u}?",
    "List the key facts about {t}.",
    "How are {t} and {u} related?",
    "Write a short encyclopedia entry about {t}.",
    "What are common misconceptions about {t}?",
    "Give an overview of {t} with headings and bullet points.",
    "Compare {t} with {u} in a table.",
)
_CODE = (
    "Write a Python function that {c}.",
    "Write a Python function that {c}. Add a docstring and an example.",
    "How do I write code in Python that {c}?",
    "Write a JavaScript function that {c}.",
    "Write a Python class about {t} with three methods.",
    "Write a short C program that {c}.",
    "Explain what this code does:\n\n{p}",
    "Write unit tests for a function that {c}.",
    "Show a SQL query for a table about {t}.",
    "Write a bash command that counts files about {t}.",
    "Create an HTML page about {t}.",
    "Write a Java method that {c}.",
)
_TASKS = (
    "reverses a string",
    "checks whether a number is prime",
    "counts the words in a text",
    "sorts a list of numbers without using sort",
    "finds the largest element of a list",
    "computes the factorial of a number",
    "returns the first n Fibonacci numbers",
    "checks whether a word is a palindrome",
    "merges two sorted lists",
    "removes duplicates from a list",
    "reads a CSV file and prints each row",
    "converts Celsius to Fahrenheit",
    "computes the average of a list",
    "flattens a nested list",
    "counts how often each letter occurs",
    "finds the common elements of two lists",
    "implements a stack",
    "implements a queue with two stacks",
    "performs a binary search",
    "computes the greatest common divisor",
    "validates an email address",
    "generates a random password",
    "transposes a matrix",
    "finds the longest word in a sentence",
    "groups words by their first letter",
    "writes a dictionary to a JSON file",
    "measures how long a function takes",
    "downloads a web page",
    "draws a triangle of stars",
    "simulates rolling two dice",
    "converts a number to binary",
    "capitalises every word of a sentence",
)
_MATH = (
    "{n} has {a} {o} and buys {b} more. How many {o} does {n} have now?",
    "{n} has {a} {o} and gives {b} to {m}. How many are left?",
    "What is {a} times {b}? Show your work.",
    "A train travels {a} km in {b} hours. What is its average speed?",
    "What is {b} percent of {a}?",
    "Solve for x: {b}x + {c} = {a}.",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and perimeter?",
    "{n} saves {b} dollars every week. How long until {n} has {a} dollars?",
    "What is the sum of the first {b} positive integers?",
    "{n} and {m} share {a} {o} equally. How many does each get?",
    "A shirt costs {a} dollars and is reduced by {b} percent. What is the new price?",
    "Simplify the fraction {b}/{a} and explain each step.",
)
_SUMMARISE = (
    "Summarise this text in one sentence:\n\n{p}",
    "Summarise the following in three bullet points:\n\n{p}",
    "{p}\n\nWhat is the main point of this text?",
    "Give this text a title and a short summary:\n\n{p}",
    "Make this text shorter:\n\n{p}",
)
_EDIT = (
    "Repeat this text exactly:\n\n{p}",
    "Correct the grammar of this text and repeat it:\n\n{p}",
    "Rewrite this text in simpler words:\n\n{p}",
    "Rewrite this text so that it sounds more formal:\n\n{p}",
    "Put each sentence of this text on a line of its own:\n\n{p}",
    "Copy this text and add a closing sentence:\n\n{p}",
)
_CREATIVE = (
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "Write a dialogue between {n} and {m} about {t}.",
    "Write the opening of a novel in which {n} discovers {t}.",
    "Invent a new holiday about {t}.",
    "Write a letter from {n} to {m} about {t}.",
    "Write a song about {t} and {u}.",
    "Imagine a world without {t}. Describe a day in it.",
    "Write a speech about {t}.",
    "Write an advertisement for {t}.",
)
_EXTRACT = (
    "List all names that occur in this text:\n\n{p}",
    "Extract the key terms from this text as a list:\n\n{p}",
    "Which verbs occur in this text?\n\n{p}",
    "Answer from the text only: what is it about?\n\n{p}",
    "Turn this text into a table of facts:\n\n{p}",
    "Write three questions that this text answers, and the answers:\n\n{p}",
)
_TEMPLATES = {
    "chat": _CHAT,
    "explain": _EXPLAIN,
    "code": _CODE,
    "math": _MATH,
    "summarise": _SUMMARISE,
    "edit": _EDIT,
    "creative": _CREATIVE,
    "extract": _EXTRACT,
}


def belongs(text: str, split: Split) -> bool:
    """Whether a topic or passage is of the split; a fixed property of the text."""
    digest = blake2b(text.encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") % _EVAL_SHARE == 0) == (split == "eval")


class Prompts:
    """An endless, seeded source of questions. `passages`: texts of some sentences to work on."""

    def __init__(self, seed: int, split: Split, passages: Sequence[str]) -> None:
        """Raises ValueError if no passage belongs to the split."""
        self._random = random.Random(f"{split} {seed}")
        topics = [" ".join(topic.split()) for topic in _TOPICS.split(";")]
        self._topics = [topic for topic in topics if belongs(topic, split)]
        self._passages = [passage for passage in passages if belongs(passage, split)]
        if not self._passages:
            raise ValueError(f"none of {len(passages)} passages belongs to the split {split!r}; gather more")

    def draw(self) -> tuple[str, str]:
        """Category and question."""
        pick = self._random.choice
        category = pick(CATEGORIES)
        first, second = self._random.sample(self._topics, 2)
        name, other = self._random.sample(_NAMES, 2)
        fields = {
            "t": first,
            "u": second,
            "n": name,
            "m": other,
            "o": pick(_THINGS),
            "p": pick(self._passages),
            "a": str(self._random.randint(20, 400)),
            "b": str(self._random.randint(2, 20)),
            "c": pick(_TASKS) if category == "code" else str(self._random.randint(1, 30)),
        }
        return category, pick(_TEMPLATES[category]).format(**fields)
