"""What generated prompts are about, and the sentences that show how they are answered.

The sentences have no commas, no capitals but the first letter, none of the letters j, q, x and z, and no word of
`FORBIDDEN` or `KEYWORDS`, so that an answer made of them breaks no instruction it was not meant to follow.
"""

TOPICS = (
    "autumn gardens", "night trains", "stone bridges", "wooden boats", "mountain huts", "old libraries",
    "street musicians", "sourdough bread", "bee keeping", "small museums", "city parks", "desert nights",
    "winter swimming", "pottery classes", "home cooking", "bicycle repair", "bird watching", "cloud spotting",
    "tide pools", "village fairs", "farm dogs", "rain barrels", "paper kites", "train stations", "mushroom hunting",
    "open fires", "hand-made shoes", "school plays", "chess clubs", "weather stations", "tree houses",
    "river ferries", "herbal teas", "mountain goats", "radio dramas", "vegetable markets", "second-hand books",
    "canal boats", "salt lakes", "island life", "weaving looms", "clay ovens", "lost letters", "secret codes",
    "morning walks", "storm watching", "roof gardens", "comet sightings", "apple orchards", "stone walls",
    "sea shanties", "puppet shows", "board games", "tiny homes", "sand dunes", "ancient roads", "polar lights",
    "garden gnomes", "family recipes", "long-distance running", "model planes", "mountain railways", "moss gardens",
    "river barges", "rowing clubs", "dawn choruses", "snow shelters", "bamboo scaffolds", "tin toys", "wind chimes",
    "cable cars", "church bells",
)  # fmt: skip
FORMS = (
    "short story", "blog post", "letter to a friend", "product description", "radio script", "travel guide", "speech",
    "review", "poem", "news report", "diary entry", "fairy tale", "advertisement", "set of tips", "museum label",
)  # fmt: skip
READERS = (
    "", "", "", " for children", " for beginners", " for a local newspaper", " for night owls", " for a museum visitor",
    " for busy parents", " for a travel club", " for new neighbours", " for a class of ten-year-olds",
)  # fmt: skip
QUESTIONS = (
    "Are {topic} worth the effort?",
    "Should a town pay for {topic}?",
    "Would you recommend {topic} to a friend?",
)

KEYWORDS = (
    *("lantern", "harbor", "copper", "velvet", "thunder", "meadow", "compass", "orbit", "pepper", "castle", "feather"),
    *("mirror", "planet", "ribbon", "shadow", "tunnel", "violin", "whistle", "anchor", "basket", "candle", "dolphin"),
    *("engine", "falcon", "granite", "hammer", "magnet", "ladder", "marble", "needle", "oyster", "pillow", "saddle"),
)
FORBIDDEN = (
    *("very", "really", "great", "important", "amazing", "thing", "nice", "good", "always", "never", "beautiful"),
    *("perfect", "however", "although", "just", "simply", "actually", "unique", "journey", "ultimately", "delve"),
)
FIRST_WORDS = ("today", "perhaps", "once", "nobody", "imagine", "later", "outside", "meanwhile", "above", "finally")
PHRASES = (
    *("That is the whole story.", "Thank you for reading.", "Now it is your turn.", "More on this tomorrow."),
    *("Is there more to say?", "Over and out.", "Keep this page near you.", "So ends the tale."),
)
PLACEHOLDERS = ("name", "date", "place", "price", "phone", "street", "time", "city")
COMMON_LETTERS, RARE_LETTERS = "etaoinsrhl", "zqxj"

SENTENCES = (
    "Learning about {topic} takes patience and a little luck.",
    "Most people hear of {topic} from a friend or a neighbour.",
    "A slow day is the right time for {topic}.",
    "There is a small club for {topic} in almost every town.",
    "Nobody forgets a first meeting with {topic}.",
    "The best part of {topic} costs nothing at all.",
    "Bring warm clothes and a notebook when you go to see {topic}.",
    "Photographs of {topic} hang in many homes.",
    "Some say that {topic} belong to the past.",
    "Others are sure that {topic} will outlive us all.",
    "In the morning {topic} look different from how they look at night.",
    "One short visit tells you more about {topic} than ten books.",
    "The smell and the sound of {topic} stay with you for years.",
    "Children understand {topic} faster than their parents do.",
    "Rain does no harm to {topic} and neither does snow.",
    "With a bit of care {topic} bring people together.",
)

LANGUAGES = {
    "de": ("German",
        "Heute Morgen haben wir lange am Fenster gestanden und den Regen beobachtet. Danach gingen die Kinder mit "
        "ihrer Großmutter in den Garten. Am Abend erzählte der Nachbar eine Geschichte über das alte Haus. Wir "
        "haben viel gelacht und sind erst spät nach Hause gegangen. Morgen wollen wir das noch einmal machen."),
    "fr": ("French",
        "Ce matin nous avons regardé la pluie tomber sur les toits de la ville. Ensuite les enfants sont allés au "
        "jardin avec leur grand-mère. Le soir notre voisin a raconté une histoire sur la vieille maison. Nous "
        "avons beaucoup ri et nous sommes rentrés très tard. Demain nous voulons recommencer."),
    "es": ("Spanish",
        "Esta mañana miramos la lluvia desde la ventana de la cocina. Después los niños fueron al jardín con su "
        "abuela. Por la noche el vecino contó una historia sobre la casa vieja. Nos reímos mucho y volvimos muy "
        "tarde a casa. Mañana queremos hacerlo otra vez."),
    "it": ("Italian",
        "Questa mattina abbiamo guardato la pioggia dalla finestra della cucina. Poi i bambini sono andati in "
        "giardino con la nonna. La sera il vicino ha raccontato una storia sulla vecchia casa. Abbiamo riso molto "
        "e siamo tornati tardi. Domani vogliamo farlo ancora."),
    "pt": ("Portuguese",
        "Hoje de manhã ficámos à janela a ver a chuva cair sobre a cidade. Depois as crianças foram para o jardim "
        "com a avó. À noite o vizinho contou uma história sobre a casa velha. Rimos muito e só voltámos muito "
        "tarde. Amanhã queremos fazer isso outra vez."),
    "nl": ("Dutch",
        "Vanmorgen hebben wij lang bij het raam naar de regen gekeken. Daarna gingen de kinderen met hun oma naar "
        "de tuin. In de avond vertelde de buurman een verhaal over het oude huis. Wij hebben veel gelachen en "
        "gingen pas laat naar huis. Morgen willen wij dat nog een keer doen."),
    "sv": ("Swedish",
        "I morse stod vi länge vid fönstret och tittade på regnet. Sedan gick barnen ut i trädgården med sin "
        "mormor. På kvällen berättade grannen en historia om det gamla huset. Vi skrattade mycket och kom hem "
        "mycket sent. I morgon vill vi göra det en gång till."),
    "fi": ("Finnish",
        "Tänä aamuna katselimme pitkään sadetta keittiön ikkunasta. Sitten lapset menivät puutarhaan isoäitinsä "
        "kanssa. Illalla naapuri kertoi tarinan vanhasta talosta. Nauroimme paljon ja tulimme kotiin hyvin "
        "myöhään. Huomenna haluamme tehdä sen uudelleen."),
    "ru": ("Russian",
        "Сегодня утром мы долго стояли у окна и смотрели на дождь. Потом дети пошли в сад вместе с бабушкой. "
        "Вечером сосед рассказал историю про старый дом. Мы много смеялись и очень поздно вернулись домой. Завтра "
        "мы хотим сделать это ещё раз."),
}  # fmt: skip
"""Code to the language's name and a short text in it."""

SHORT_TOPICS = ("bees", "owls", "cats", "dogs", "figs", "fish", "ants", "elks", "hens", "bats", "cows", "eels")
SHORT_KEYWORDS = ("moon", "star", "lake", "hill", "gold", "bell", "drum", "rope")
SHORT_PHRASES = ("bye.", "amen.", "the end.", "over.")
SHORT_SENTENCES = ("{topic} are here, now.", "i like {topic}, too.", "so {topic} it is, yes.", "we saw {topic}, then.")
