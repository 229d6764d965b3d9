"""Test lines for tokenizers: deterministic, in many scripts, with everything that pre-tokenizers treat specially.

lines(seed, per_kind) gives per_kind lines of each kind, without repetitions. All are valid UTF-8; a "line" may hold line breaks.
Random code points are taken from those that Python's Unicode tables assign (Python 3.11: Unicode 14).
"""

import base64
import glob
import os
import random
import unicodedata

WORDS = {
    "latin": "the house and a bird sing over old rivers whose names nobody remembers Tuesday NASA iPhone McDonald "
             "naïve café crème brûlée Übergröße straße señor mañana coração não łódź żółw příliš žluťoučký kůň İstanbul "
             "ığdır smørrebrød ångström þing ðat œuvre æther việt nam tiếng đường hawaiʻi quốc ngữ I'm don't we'll it's THEY'RE",
    "cyrillic": "дом река старый человек поезд Москва Київ їжак єдність ўсё љубав ћирилица жизнь подъезд объём ёлка Щука",
    "greek": "θάλασσα καλημέρα Ελλάδα φως ψυχή άνθρωπος ΣΟΦΟΣ ὁ λόγος ἀρχή ᾠδή ἑλληνική",
    "arabic": "السلام عليكم مدينة كتاب مدرسة قهوة ٱلْكِتَابُ بِسْمِ ٱللَّهِ پنجره گفتگو چای می‌خواهم اردو ہے یہ نستعلیق",
    "hebrew": "שלום עולם ספר מים ירושלים בְּרֵאשִׁית אֱלֹהִים צה״ל ג׳ירפה",
    "indic": "नमस्ते दुनिया क्षत्रिय विद्यालय पानी বাংলা ভাষা আমি ਪੰਜਾਬੀ ગુજરાતી தமிழ் மொழி తెలుగు ಕನ್ನಡ മലയാളം සිංහල",
    "southeast": "สวัสดีชาวโลก ภาษาไทย น้ำ ผู้ใหญ่ ລາວ ພາສາ မြန်မာ ဘာသာ ភាសាខ្មែរ",
    "han": "世界 你好 中文分词 图书馆 我们明天去北京 漢字 龍鳳 銀行 學習 𠮷野家 㐂 〇 人工智能 数据",
    "kana": "こんにちは ありがとう カタカナ コンピューター ﾊﾝｶｸ がぎぐげご パピプ ゞ ヽ 々 東京タワー ゐゑ",
    "hangul": "안녕하세요 세계 한국어 도서관 값 닭이 ᄒᆞᆫ글 ㄱㄴㄷ ㅋㅋㅋ 서울특별시",
    "other": "გამარჯობა საქართველო Հայերեն բարեւ አማርኛ ሰላም ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ བོད་སྐད ᠮᠣᠩᠭᠣᠯ ⵜⴰⵎⴰⵣⵉⵖⵜ ދިވެހި ꦗꦮ 𐌲𐌿𐍄𐌹𐍃𐌺 𒀭𒂗𒆤 𓀀𓁐",
}
WORDS = {script: words.split() for script, words in WORDS.items()}
EMOJI = "😀 😂 🥺 👍 👍🏽 👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🏴‍☠️ 🇩🇪 🇨🇳🇯🇵 🇺🇳 1️⃣ #️⃣ ❤️ ❤ ☀️ ✈︎ 🤷🏿‍♂️ 🧑🏻‍🤝‍🧑🏾 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🫠 🎉🎉🎉 ©️ ™ ㊗️ 🀄 ⌚".split()
SPACES = ["\u0020"] * 8 + list("\t\n\r\v\f\u0085\u00a0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000") + ["\r\n", "\n\n", "    ", "  "]
INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad\u034f\u061c\u180e\u202a\u202e\u2066\u2069\ufe0f\ufe0e\ufff9\ufffc\ufffd"
MARKS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030c\u0323\u0327\u0328\u0331\u0336\u20dd\u0489\u05b0\u064b\u093f\u0e34\u3099\u302a\ufe20"
PUNCTUATION = list(".,;:!?…—–-()[]{}<>\"'`´“”‘’«»‹›„¡¿、。，！？；：「」『』（）【】《》·•†‡§¶@#$%^&*_+=|\\/~°€£¥₹₿±×÷≠≤∞∑√∂→⇒■□◆★☆♪")
NUMBERS = "0 7 10 42 365 1999 2024 12345 1,234,567.89 3.14159 1e-10 0xFF 0b1010 100% $5.00 -273.15 12:34:56 2024-02-29 1/2 ½ ¼ x² H₂O 10⁻³ Ⅷ ⅻ ① ⑳ ㊿ ١٢٣ ۴۵۶ १२३ ๑๒๓ ０１２ 一二三 𝟙𝟚 𝟬 ௰ ꩐ ৪ 4th 1st 5G 90s".split()
CONTRACTIONS = "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'VE 'M 'LL 'D ’s ’t ’re ’ve 'Ll 'x 'l 'r 'v 'dd 'ss 'llama 'tis 'em".split()
SPECIALS = "<|im_start|> <|im_end|> <|endoftext|> <|begin_of_text|> <|eot_id|> <s> </s> <unk> <pad> [INST] [/INST] <<SYS>> <|im_start|>user <|im_ end|> <|im_start <0x0A> ▁ Ġ Ċ ĠĠ".split()
CODE = [
    "for (int {0} = 0; {0} < {2}; ++{0}) {{\n{3}{1}[{0}] += {2};\n}}", "def {0}({1}, *args, **kwargs):\n{3}return {1} ** {2}\n",
    "{0} = lambda {1}: {1}[::-1]  # {2}", "#include <{0}.h>\n#define {1} ({2}u << 3)\n", "<div class=\"{0}\" id='{1}'>{2}&nbsp;</div>",
    "SELECT {0}, COUNT(*) FROM {1} WHERE id >= {2};", "{{\"{0}\": [{2}, null, true], \"{1}\": {{}}}}", "$ git commit -m \"{0}: {1}\" --author={2}",
    "\\begin{{align}} \\frac{{{0}}}{{{1}}} &= {2} \\\\ \\end{{align}}", "fn {0}<'a>(x: &'a str) -> Option<{1}> {{ None }} // {2}",
    "{3}if {0}!={1}&&!{0}||{2}:\n{3}{3}pass", "https://www.example.org/{0}/{1}?q={2}#top", "C:\\Users\\{0}\\{1}.txt", "/usr/lib/{0}-{2}/{1}.so.6",
    "{0}.{1}@example.com", "#!/bin/sh\nset -e\n{0}=${{{1}:-{2}}}\n", "| {0} | {1} |\n|---|---:|\n| {2} | x |", "{0}::{1}->operator()({2});", "@{0} #{1} v{2}.0.1-rc1",
]


def assigned(point):
    """Assigned and not a surrogate; private use counts as assigned."""
    return not 0xD800 <= point <= 0xDFFF and unicodedata.category(chr(point)) != "Cn"


def words(r, script, count):
    return [r.choice(WORDS[script]) for _ in range(count)]


def identifier(r):
    parts = [r.choice("get set is buffer node x tmp user_id HTTP parse count i j MAX value _private camelCase".split()) for _ in range(r.randint(1, 3))]
    return r.choice(["", "_"]).join(parts)


def sentence(r, scripts):
    out = []
    for _ in range(r.randint(2, 10)):
        word = r.choice(WORDS[r.choice(scripts)])
        out.append(word + (r.choice(PUNCTUATION) if r.random() < 0.25 else ""))
    return r.choice([" ", " ", " ", "", "  ", "-"]).join(out)


def code(r):
    return r.choice(CODE).format(identifier(r), identifier(r), r.choice([r.randint(0, 99999), identifier(r)]), r.choice(["    ", "\t", "  ", "        "]))


def spaced(r):
    run = lambda: "".join(r.choice(SPACES) for _ in range(r.choice([0, 1, 1, 2, 3, 5, 9])))
    return "".join(run() + r.choice(words(r, "latin", 1) + [r.choice(NUMBERS), r.choice(PUNCTUATION), r.choice(WORDS["han"]), ""]) for _ in range(r.randint(1, 7))) + run()


def controls(r):
    pool = [chr(c) for c in [*range(0, 32), *range(127, 160)]] + list(INVISIBLE)
    return "".join(r.choice(pool) if r.random() < 0.5 else r.choice(WORDS["latin"]) for _ in range(r.randint(2, 9)))


def marked(r):
    word = " ".join(words(r, r.choice(list(WORDS)), r.randint(1, 4)))
    if r.random() < 0.4:
        return unicodedata.normalize(r.choice(["NFD", "NFKD", "NFC", "NFKC"]), word)
    return "".join(c + "".join(r.choice(MARKS) for _ in range(r.choice([0, 0, 1, 1, 2, 6]))) for c in word)


def any_point(r):
    """Blocks first, so that small scripts come up as often as the large ones."""
    while True:
        start = r.choice([0, 0x80, r.randrange(0, 0x3100, 16), r.randrange(0, 0x3100, 16), r.randrange(0x3100, 0x10000, 16),
                          r.randrange(0x10000, 0x11800, 16), r.randrange(0x1D000, 0x1D800, 16), r.randrange(0x1F000, 0x1FA00, 16),
                          r.randrange(0x20000, 0x2A000, 16), 0xE0000, 0xE100, 0xF0000, 0x10FFF0])
        point = start + r.randrange(16)
        if assigned(point):
            return chr(point)


def contraction(r):
    return "".join(r.choice(["", " ", "I", "we", "John", "café", "他", "5", "!"]) + r.choice(CONTRACTIONS) + r.choice(["", " ", "s", ".", "1", "\n"]) for _ in range(r.randint(1, 6)))


def repeated(r):
    unit = r.choice(["a", "A", "=", "-", ".", "!", "_", "#", "*", "ha", "no ", "\t", " ", "\n", "0", "1", "9", "ж", "啊", "ｗ", "🙂", "'", "/", "ab ", "\r\n", "’", "é", "e\u0301"])
    return r.choice(["", "x", " "]) + unit * r.choice([2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 100]) + r.choice(["", "x", " ", "\n"])


def excerpt(r, texts):
    text = r.choice(texts)
    at = r.randrange(len(text))
    return text[at:at + r.randint(5, 120)]


def blob(r):
    data = bytes(r.randrange(256) for _ in range(r.randint(4, 40)))
    return r.choice([base64.b64encode(data).decode(), data.hex(), data.hex("-", 4), base64.b32encode(data).decode(), data.decode("latin-1"), data.decode("utf-8", "replace")])


def from_vocabulary(r, pieces):
    return "".join(r.choice(pieces) for _ in range(r.randint(1, 12)))


def kinds(pieces):
    here = os.path.dirname(os.path.abspath(__file__))
    texts = []
    for path in sorted(glob.glob(os.path.join(here, "text", "*.txt"))):
        with open(path, encoding="utf-8") as f:
            texts.append(f.read())
    every = list(WORDS)
    yield from ((lambda r, s=script: sentence(r, [s])) for script in every)
    yield lambda r: sentence(r, every)
    yield lambda r: sentence(r, ["latin", r.choice(every)])
    yield lambda r: " ".join(words(r, "latin", r.randint(1, 3)) + [r.choice(NUMBERS)] + words(r, r.choice(every), 2))
    yield lambda r: r.choice(["", " ", "x", "第"]).join(r.choice(NUMBERS) for _ in range(r.randint(1, 6)))
    yield lambda r: str(r.randrange(10 ** r.randint(1, 30)))
    yield lambda r: r.choice(["", " "]).join(r.choice(EMOJI + words(r, "latin", 5)) for _ in range(r.randint(1, 8)))
    yield lambda r: "".join(r.choice(PUNCTUATION) * r.choice([1, 1, 2, 3]) + r.choice(["", " ", "a", "\n"]) for _ in range(r.randint(1, 12)))
    yield lambda r: r.choice(["", " ", "\n"]).join(r.choice(SPECIALS + words(r, "latin", 4)) for _ in range(r.randint(1, 6)))
    yield lambda r: "".join(any_point(r) for _ in range(r.randint(1, 24)))
    yield lambda r: "".join(any_point(r) if r.random() < 0.3 else r.choice([" ", "a", "é", "1", "中", "."]) for _ in range(r.randint(3, 24)))
    yield lambda r: excerpt(r, texts)
    yield lambda r: from_vocabulary(r, pieces)
    yield from (code, code, spaced, spaced, controls, marked, contraction, repeated, blob)


def lines(seed, per_kind, pieces):
    r = random.Random(seed)
    return list(dict.fromkeys([""] + [make(r) for make in kinds(pieces) for _ in range(per_kind)]))
