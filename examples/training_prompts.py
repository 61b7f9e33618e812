"""Writes prompts for `ldjax train --prompts`: kinds of request, many subjects.

    python examples/training_prompts.py 8000 > prompts.jsonl

They were made for ldjax; none is from a benchmark. Each line is
{"prompt": "..."}; the first n are the same however many are asked for.
"""

import json
import random
import sys

SUBJECTS = """
photosynthesis; the water cycle; inflation; black holes; vaccines; volcanoes;
the French Revolution; plate tectonics; machine learning; the stock market;
gravity; electric cars; solar panels; the human heart; sleep; memory; coffee;
chocolate; bread baking; gardening; bees; whales; dinosaurs; the Moon; Mars;
climate change; recycling; public transport; bicycles; marathon running; yoga;
meditation; chess; poker; football; basketball; swimming; hiking; camping;
photography; oil painting; jazz; opera; the violin; the guitar; poetry; novels;
Shakespeare; ancient Rome; ancient Egypt; the Vikings; the Silk Road; the
printing press; the steam engine; the telephone; the internet; e-mail; social
media; video games; robots; drones; 3D printing; quantum computing; encryption;
passwords; databases; compilers; operating systems; the Python language; SQL;
web pages; binary search; sorting; recursion; hash tables; linked lists; unit
tests; version control; prime numbers; fractions; probability; statistics; the
Pythagorean theorem; calculus; matrices; graphs; set theory; supply and demand;
taxes; budgets; savings accounts; mortgages; insurance; start-ups; marketing;
job interviews; teamwork; leadership; negotiation; public speaking; time
management; remote work; e-commerce; tourism; airports; trains; ships; bridges;
skyscrapers; architecture; interior design; fashion; cooking; nutrition;
vitamins; vegetarian food; allergies; headaches; blood pressure; diabetes;
exercise; stress; friendship; parenting; school; universities; libraries;
museums; languages; translation; grammar; spelling; essays; letters; speeches;
democracy; elections; constitutions; courts; human rights; the United Nations;
trade; farming; rice; wheat; forests; deserts; oceans; rivers; lakes; rain;
snow; hurricanes; earthquakes; fossils; atoms; molecules; acids; metals; water;
oxygen; carbon; DNA; cells; bacteria; viruses; evolution; ecosystems; food
chains; birds; cats; dogs; horses; elephants; sharks; spiders; butterflies;
mushrooms; trees; flowers; seasons; calendars; clocks; maps; compasses; stars;
telescopes; rockets; satellites; astronauts; radio; television; film; theatre;
dance; sculpture; pottery; knitting; woodworking; plumbing; electricity;
batteries; magnets; light; sound; heat; engines; pumps; aeroplanes; cars; roads;
cities; villages; islands; mountains; glaciers; caves; castles; pirates;
knights; dragons; ghosts; magic; time travel; dreams; happiness; justice;
courage; honesty; kindness; patience; curiosity; creativity; artificial
intelligence; the future of work; space travel; nuclear power; wind turbines
"""
PLACES = """
Paris; Tokyo; New York; London; Rome; Cairo; Sydney; Rio de Janeiro; Hawaii;
Iceland; Norway; Kenya; India; Peru; Canada; Greece; Thailand; Morocco; Spain;
Ireland; Vietnam; Turkey; Mexico; Switzerland; New Zealand; South Korea
"""
PEOPLE = """
a detective; a lonely robot; a young wizard; an old fisherman; a lost dog; a
brave princess; a curious scientist; two rival chefs; a ghost; a time traveller;
a talking cat; a violin teacher; an astronaut; a farmer; a nurse; a spy; a
dragon; a librarian; a clockmaker; a mountain climber; twins; a shy giant
"""
FORMS = """
poem; short story; song; letter; blog post; news article; speech; dialogue;
product description; e-mail; limerick; haiku; review; diary entry; fable; essay;
advertisement; fairy tale; movie scene; newspaper headline and first paragraph
"""
AUDIENCES = """
a five-year-old; a high-school student; a beginner; an expert; a busy manager;
my grandmother; a tourist; a new employee; a class of ten-year-olds
"""
ROLES = """
a doctor; a math teacher; a travel guide; a chef; a lawyer; a pirate; Sherlock
Holmes; a fitness coach; a historian; a software engineer; a poet; a therapist;
a stand-up comedian; a news anchor; an English teacher; a gardener; a scientist
"""
TASKS = """
reverses a string; checks whether a number is prime; computes the Fibonacci
numbers; sorts a list of words by length; counts the vowels of a text; finds the
largest element of a list; removes duplicates from a list; reads a CSV file and
prints the average of a column; merges two sorted lists; checks for a
palindrome; converts Celsius to Fahrenheit; finds the common elements of two
arrays; computes a factorial; implements a stack; implements binary search;
counts the words of a file; validates an e-mail address; draws a triangle of
stars; simulates rolling two dice; finds the shortest path in a grid; transposes
a matrix; parses a date; fetches a web page; prints a multiplication table
"""
LANGUAGES = "Python; JavaScript; Java; C++; SQL; HTML; Rust; Go; Bash"
NAMES = (
  "Anna; Ben; Carla; David; Emma; Felix; Grace; Hugo; Ida; Jack; Lena; Tom"
)
ITEMS = (
  "apples; books; pencils; marbles; coins; tickets; cookies; stamps; shirts"
)
WORDS = """
happy; ancient; swift; fragile; brilliant; stubborn; generous; obscure; vivid;
reluctant; abundant; precise; gloomy; elegant; fierce; humble; curious; vast
"""


def options(text):
  return [" ".join(part.split()) for part in text.split(";")]


LISTS = {
  "subject": SUBJECTS,
  "other": SUBJECTS,
  "third": SUBJECTS,
  "place": PLACES,
  "person": PEOPLE,
  "form": FORMS,
  "audience": AUDIENCES,
  "role": ROLES,
  "task": TASKS,
  "language": LANGUAGES,
  "name": NAMES,
  "friend": NAMES,
  "item": ITEMS,
  "word": WORDS,
}
REQUESTS = """
Explain {subject} to {audience}.
What is the difference between {subject} and {other}?
Write a {form} about {subject}.
Write a {form} about {person} and {subject}.
Write a {form} in which {person} visits {place}.
Give me {n} tips about {subject}.
What are the advantages and disadvantages of {subject}?
Why is {subject} important?
Describe the history of {subject} in {n} sentences.
List {n} facts about {subject}.
How does {subject} work?
How do I get started with {subject}?
Plan a {n}-day trip to {place}.
What should I eat in {place}, and why?
Compare {place} and {other} for a holiday.
You are {role}. Answer this: what do you think about {subject}?
Imagine you are {role}. Explain {subject} in your own style.
Act as {role} and give me advice about {subject}.
Write a {language} program that {task}.
Write a function in {language} that {task}, and explain each step.
What is wrong with this idea: "{subject} will replace {other}"?
Summarise what is known about {subject} in one paragraph.
Write an introduction for an essay on {subject} and {other}.
Draft an e-mail to {name} to cancel a meeting about {subject}.
Write a persuasive paragraph in favour of {subject}.
Invent a company that sells {subject} and describe its first product.
{name} has {n} {item} and gives {m} to {friend}. How many are left?
{name} buys {n} {item} at {m} dollars each. What is the total cost?
If a train goes {n}0 km in {m} hours, how fast is it on average? Show the steps.
What is {n} times {m}, plus {k}? Show your work.
Solve for x: {m}x + {k} = {n}{k}.
A rectangle is {n} cm long and {m} cm wide. What are its area and perimeter?
What is the probability of drawing a red card twice? Explain for {audience}.
Use the word "{word}" in {m} sentences.
Give {n} synonyms of "{word}" and an example of each.
Rewrite this politely: "I do not want to talk about {subject}."
Correct the grammar: "{name} and {friend} was talking about {subject}."
Classify these as living or not living: {subject}, {other}, {third}.
Extract the names: "{name} met {friend} in {place} to discuss {subject}."
Make a table with three columns about {subject}, {other} and {third}.
Turn this into JSON: name {name}, city {place}, age {n}{m}, hobby {subject}.
Write {n} quiz questions about {subject}, with answers.
Who would win in a debate about {subject}, {role} or {person}?
Tell me a joke about {subject}.
What would happen if there were no {subject}?
Describe a morning in {place} using all five senses.
Continue the story: "{person} opened the door and saw {other}."
What are common mistakes with {subject}, and how can I avoid them?
Explain the connection between {subject} and {other}.
Outline a presentation on {subject} with {n} slides.
Hello! Can you help me with {subject}?
Give me a recipe that has something to do with {subject}.
Write a Wikipedia-style article about {subject}.
Translate "I like {subject}" into Spanish, French and German.
Is it true that {subject} causes {other}? Give reasons.
Write step-by-step instructions about {subject} for {audience}.
"""


def prompts(count):
  """The first `count` prompts."""
  lists = {name: options(text) for name, text in LISTS.items()}
  requests = REQUESTS.strip().splitlines()
  draw = random.Random(20261201)
  seen = set()
  while len(seen) < count:
    words = {name: draw.choice(values) for name, values in lists.items()}
    numbers = {name: draw.randint(3, 9) for name in "nmk"}
    text = draw.choice(requests).format(**words, **numbers)
    if text not in seen:
      seen.add(text)
      yield text


if __name__ == "__main__":
  for text in prompts(int(sys.argv[1])):
    print(json.dumps({"prompt": text}))
