"""The texts that a model is checked with, by what kind of text they are."""

TEXTS: dict[str, tuple[str, ...]] = {
    "prose": (
        "The miller's daughter knew the river by its sound. When it rose in spring it hummed under the floor, and when "
        "the gate was shut it only whispered. One night she woke because there was no sound at all, and she ran down",
        "Bread needs little: flour, water, salt and time. Mix them in the evening, cover the bowl with a cloth, and by "
        "the next morning the dough has doubled. Heat the oven as far as it goes before you",
        "Glaciers move because ice under pressure bends before it breaks. The lower layers creep over the rock while "
        "the upper ones are carried along, and crevasses open where the bed becomes steeper. In warm years",
        "Dear Ms. Okafor, thank you for your letter of 3 March. The pump that you describe is still under warranty, "
        "so the repair costs you nothing. Please send it, with a copy of the invoice, to our workshop in",
    ),
    "questions": (
        "Question: Which planet has the shortest year?\nAnswer: Mercury, which goes around the sun in 88 days.\n\n"
        "Question: Why does ice float on water?\nAnswer:",
        "User: My train is 20 minutes late and I have 35 minutes to change. Will I make it?\n"
        "Assistant: Yes. 35 less 20 leaves you 15 minutes, which is enough if the platforms are close. Is there",
    ),
    "code": (
        'def median(values: list[float]) -> float:\n    """The middle value, or the mean of two."""\n'
        "    ordered = sorted(values)\n    half = len(ordered) // 2\n    if len(ordered) % 2:\n        return",
        "#include <vector>\n\n// Removes every element that equals its predecessor.\ntemplate <typename T>\n"
        "void squeeze(std::vector<T>& items) {\n    size_t kept = 0;\n    for (size_t i = 0; i < items.size(); ++i)",
        "SELECT customer.name, SUM(line.price * line.quantity) AS total\nFROM customer\n"
        "JOIN purchase ON purchase.customer_id = customer.id\nJOIN line ON line.purchase_id = purchase.id\nWHERE",
        "#!/bin/sh\n# Keeps the last seven backups and removes the others.\nset -eu\ncd /var/backups\n"
        "ls -1t backup-*.tar.gz | tail -n +8 | while read -r old; do\n",
    ),
    "lists": (
        "Things to pack for three days in the mountains:\n- boots that have been worn before\n- a rain jacket\n"
        "- two pairs of warm socks\n- a map on paper\n- a headlamp and spare",
        "| month | rain in mm | days of sun |\n|---|---|---|\n| January | 64 | 9 |\n| February | 51 | 11 |\n"
        "| March | 58 | 14 |\n| April |",
        "1. 17 + 25 = 42\n2. 9 * 8 = 72\n3. 144 / 12 = 12\n4. 81 - 37 = 44\n5. 6 * 15 =",
    ),
    "JSON": (
        '{"order": 1187, "customer": {"name": "Ines Duarte", "city": "Porto"}, "items": [{"sku": "B-204", "count": 2, '
        '"price": 14.5}, {"sku": "K-9", "count": 1, "price":',
        '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}\n'
        '{"name": "get_weather", "arguments": {"city": "Nairobi", "unit":',
    ),
    "other languages": (
        "Der Zug nach Bremen fährt heute von Gleis sieben. Wer umsteigen möchte, hat in Hannover zwölf Minuten Zeit "
        "und muss durch die Unterführung auf die andere Seite. Der Speisewagen",
        "La bibliothèque ouvre à neuf heures, sauf le lundi. Pour emprunter un livre, il suffit de présenter sa "
        "carte; on peut le garder trois semaines, et demander",
        "El puente viejo cruza el río donde antes había un molino. Los niños se sientan en el muro y cuentan los "
        "barcos que pasan, mientras sus abuelos",
        "今天早上下了一场大雨，河水涨得很快。村里的人把东西搬到二楼，等着水退下去。到了下午，",
        "駅の前に小さなパン屋があります。朝の六時に開いて、焼きたてのパンの匂いが通りに広がります。",
        "Зимой озеро замерзает, и дорога через лёд становится вдвое короче. Рыбаки выходят на рассвете и",
        "सुबह की बस पाँच बजे निकलती है और दोपहर तक शहर पहुँच जाती है। रास्ते में दो बार",
        "تفتح المكتبة أبوابها في الثامنة صباحا، ويجلس الطلاب قرب النوافذ حتى المساء.",
    ),
}
