"""The words that show what a request asks for, one role a word, in English, Spanish, Portuguese, French and German.

A verb asks for something; a noun says what. Where one word has two roles, the role listed first keeps it.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BY_ROLE = {
    # verbs
    "make": """write create generate implement build make craft give compose develop provide produce return output respond reply
        answer tell come continue brainstorm invent need want fill draft devise design show escribe escriba escribir crea
        crear cree genera haz dame necesito quiero inventa redacta responde devuelve devuélveme cuéntame cuenta compón
        continúa implementa escreva escrever crie criar gere faça faz preciso quero conte invente componha responda devolva
        retorne dê implemente continue écris écrivez crée créez génère donne raconte retourne renvoie réponds schreibe schreib
        erstelle erzeuge generiere gib erzähle erfinde antworte implementiere programmiere""",
    "edit": """fix edit correct debug optimize optimise refactor rewrite rename replace modify change add remove sort complete extend
        improve update corrige corregir corrija corrigir añade agrega refactoriza reescribe reemplaza sustituye ordena elimina
        optimiza refatore reescreva adicione acrescente substitua remova ordene otimize corrigez corriger réécris ajoute
        remplace korrigiere ersetze ergänze optimiere sortiere""",
    "convert": """convert transform turn port format reformat convierte convertir transforma pasa converta converte transforme convertis
        convertissez wandle konvertiere""",
    "translate": "translate paraphrase rephrase traduce traducir traduza traduzir traduis traduisez übersetze übersetzen",
    "extract": """extract redact anonymize anonymise proofread quote cite copy transcribe extrae extraer extraiga cita copia extraia
        extrair copie transcreva extrais extrayez relève extrahiere zitiere kopiere""",
    "list": """list find identify enumerate locate highlight tag pull identifica enumera encuentra señala localiza liste listar
        identifique encontre aponte enumere identifie trouve nenne finde""",
    "summarise": """summarize summarise condense shorten recap resume resumir resuma resúmeme sintetiza condensa acorta sintetize encurte
        résume résumez résumer fasse zusammenfassen""",
    "explain": """explain describe review compare discuss analyze analyse evaluate classify rate recommend suggest solve teach advise
        explica explícame explique explicar compara analiza evalúa clasifica recomienda descreva compare avalie classifique
        recomende expliquez décris erkläre beschreibe vergleiche bewerte""",
    "imagine": "imagine pretend roleplay imagina imaginemos finge imaginez narrate",
    "ask": """what why how when where who whose which is are does do did should could would will has have qué cuál cuáles cómo
        cuándo dónde quién quiénes qual quais como quando onde quem quel quelle quels quelles pourquoi comment quand où was
        wie warum wann wer wo welche welcher welches""",
    # nouns
    "code": """function functions script scripts code regex snippet query dockerfile makefile manifest docstring docstrings endpoint
        algorithm variable stylesheet función funciones código consulta algoritmo função funções fonction requête funktion
        skript quellcode""",
    "language": """python java javascript typescript rust golang kotlin scala haskell ruby php perl swift bash powershell sql mysql
        postgresql sqlite html css react vue angular django flask pandas numpy pytest unittest kubernetes terraform ansible
        docker latex matlab solidity cuda fortran cobol c++ c# f#""",
    "unit": """class method program programs test tests component module hook app cli clase método programa prueba classe programme
        programm klasse""",
    "machine": "json jsonl ndjson yaml yml csv xml toml",
    "fields": "fields keys schema template campos claves chaves plantilla esquema champs felder schlüssel",
    "invented": """story stories tale poem poems poetry poet sonnet haiku limerick lyrics song rap verse fiction novel screenplay scene
        dialogue monologue joke jokes riddle slogan slogans tagline taglines backstory villain storyteller narrator fable
        legend myth blog parody ode ballad cuento historia poema poemas poeta soneto canción chiste chistes leyenda fábula
        diálogo eslogan relato novela adivinanza conto história crônica crónica piada piadas canção letra lenda poesia
        histoire conte poème chanson blague légende haïku geschichte gedicht märchen witz lied fabel""",
    "gist": "summary summaries takeaways gist synopsis resumen resumo sumário síntesis síntese résumé synthèse zusammenfassung",
    "language_use": """grammar grammatical spelling typos punctuation gramática ortografía ortografia grammaire orthographe grammatik
        rechtschreibung""",
    "grounded": "context passage excerpt contexto pasaje passagem contexte kontext",
    "given": """text below following above article email document report abstract paragraph minutes transcript contract notes these
        mentioned texto siguiente anterior artículo documento mencionados mencionadas correo noticia notícia abaixo seguir
        seguinte acima artigo texte suivant folgenden""",
    "message": "letter message essay memo agenda carta mensaje mensagem lettre courriel nachricht",
}
ROLES: dict[str, str] = {word: role for role, words in reversed(_BY_ROLE.items()) for word in words.split()}
VERBS = frozenset({"make", "edit", "convert", "translate", "extract", "list", "summarise", "explain", "imagine"})

# A verb is a demand at the start of a clause, after one of these words, or after one of these pairs ("I want you to list").
BEFORE_DEMAND = frozenset(".:;!?,\n") | _words(
    "please you me and or then just now also only kindly por favor y e ou et und bitte puedes podrías pode poderia peux"
)
PAIRS_BEFORE_DEMAND = frozenset({("let", "s"), *((word, "to") for word in _words("you is task job need like help goal"))})
WISHES = _words("need want necesito quiero preciso quero come")  # demands though "I" stands before them
WRITES = _words("write implement escribe escriba implementa escreva implemente écris schreibe schreib")
REWORDS = _words("rewrite reescribe reescreva réécris improve extend change")  # edits that leave little of a prose text as it was
CLAUSE_END = frozenset(".!?\n:")
INTO = _words("to into as in en em para au als zu nach valid only format formato válido apenas solo nur")

TOKEN = re.compile(r"\w+(?:\+\+|#)?|[.:;!?,\n]")
# The first group holds lines that only source code has; two of the others make code likely.
CODE_LINE = re.compile(
    r"^[ \t]*((?:async )?def \w+\(|class \w+[:({]|from [\w.]+ import |import [\w.{*]+;?$|#include\b|#!/|func [\w(]|(?:pub )?fn \w+|"
    r"(?:export |async )*function\b[^\n]*\(|(?:public |private |static )+\w[^\n]*[({=]|SELECT\b[^\n]* FROM |"
    r"(?:CREATE|ALTER) TABLE|INSERT INTO|<(?:html|div|!DOCTYPE))|"
    r"^[ \t]*(?:export |const |let |var )+\w[^\n]*=|^(?:FROM|COPY|RUN|CMD) |^SELECT |^FROM |[;{}][ \t]*$",
    re.MULTILINE,
)
OPENING = re.compile(r"\W*(?:once upon a time|(?:había|érase) una vez|era uma vez|il était une fois|es war einmal)", re.IGNORECASE)
GIST = re.compile(
    r"\btl;?\s?dr\b|\b(?:key|main) (?:points|ideas)\b|"
    r"\b(?:puntos|pontos|points) (?:clave|principa|clés|essentiel)|\bsum up\b|\bsummary:\s*$",
    re.IGNORECASE,
)
GROUNDED = re.compile(
    r"\b(?:(?:based on|according to|using only) th(?:e|is|ese)|según|de acordo com|com base n[oa]|d'après|laut) ", re.IGNORECASE
)
TEMPLATE = re.compile(r"[{\[]\s*\{?\s*[\"']\w+[\"']\s*:")
