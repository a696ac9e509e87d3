"""What the requests of ``benchmarks.speculation`` ask for."""

Conversation = list[dict[str, str]]

TASKS = ("mixed", "rewrite", "code")

_TEXT = (
    "The river rises in the hills above the town and runs through three lakes before it reaches the sea. "
    "In spring the water is high and the mills along its banks work day and night. Item {n}."
)
_NEW = "Write a short story about a lighthouse keeper and number {n}."
_REWRITE = "Write this text again, with '{new}' instead of '{old}' and nothing else changed:\n\n{text}"
_REWRITTEN = (
    (
        "station",
        "harbour",
        "The station opens at five in the morning. The first train leaves ten minutes later and is rarely full: a "
        "few nurses, two bakers and a man with a cello, who gets off at the third stop. By seven the platforms are "
        "crowded, and the clock above the entrance, which has been slow since the winter, is corrected by hand. "
        "People who know the station wait at the far end, where the last car stops.",
    ),
    (
        "committee",
        "council",
        "The committee met on Tuesday to discuss the new bridge. Three offers had arrived, all of them above the "
        "budget. After two hours the committee decided to ask for a smaller design with one lane for cars and a wide "
        "path for bicycles. The engineers were given six weeks. A member noted that the old bridge had been planned "
        "for horses and had still carried trucks for forty years.",
    ),
    (
        "onions",
        "carrots",
        "Cut the onions into thin rings and cook them slowly in butter until they are soft and brown, which takes "
        "about forty minutes. Add a spoon of flour, stir for a minute, and pour in the stock. Let the soup simmer "
        "while you toast the bread. Put the bread on top, cover it with cheese, and bake everything for ten minutes. "
        "The onions may be cooked a day before.",
    ),
    (
        "valve",
        "switch",
        "Before you open the housing, close the main valve and wait until the pressure gauge shows zero. Remove the "
        "four screws, lift the cover and set it aside. The filter is the grey cylinder on the left. Pull it straight "
        "up, clean the seat with a dry cloth, and insert the new filter until it clicks. Close the cover, open the "
        "valve slowly, and check for leaks.",
    ),
    (
        "teacher",
        "librarian",
        "Dear parents, on Friday the class will visit the museum of natural history. Please give your child a small "
        "lunch and a bottle of water. We meet the teacher in front of the school at half past eight and will be back "
        "at three. Children who do not take part stay with the parallel class. If your child needs medicine, tell the "
        "teacher by Wednesday.",
    ),
    (
        "bees",
        "wasps",
        "In late summer the number of bees falls quickly. The queen lays fewer eggs, the drones are driven out, and "
        "the workers close every gap with resin. What looks like rest is preparation: the bees that hatch now will "
        "live for six months instead of six weeks. They form a tight ball around the queen and keep her warm by moving "
        "the muscles of their wings without flying.",
    ),
)
_CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Python function that merges two sorted lists.",
    "Write a Python function that counts the words of a text file.",
    "Write a Python implementation of binary search.",
    "Write a Python function that flattens a nested list.",
    "Write a Python function that reads a CSV file and sums a column.",
    "Write a Python decorator that measures the time of a call.",
    "Write a Python function that finds all prime numbers below n.",
)


def question(task: str, n: int) -> str:
    """The n-th request of a task."""
    if task == "code":
        return _CODE[n % len(_CODE)]
    if task == "rewrite":
        old, new, text = _REWRITTEN[n % len(_REWRITTEN)]
        return _REWRITE.format(old=old, new=new, text=text)
    return _NEW.format(n=n) if n % 2 else f"Repeat this text word for word: {_TEXT.format(n=n)}"


def conversations(task: str, batch: int, requests: int) -> list[list[Conversation]]:
    """The requests of a turn, in batches."""
    every = [[{"role": "user", "content": question(task, n)}] for n in range(max(batch, requests))]
    return [every[first : first + batch] for first in range(0, len(every), batch)]


def ignores_end(task: str) -> bool:
    """Whether answers go on behind their end to be equally long. What follows a rewritten text is no rewriting."""
    return task != "rewrite"
