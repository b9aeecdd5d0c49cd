// How the search orders what it finds. Sphinx's own order is by kind, then alphabetical.
// WEIGHTS (extension.py): word → page → how much the page says of it.

// Browsers refuse to read other pages for file://, so excerpts are shown over http only.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = window.location.protocol !== "file:";

const FOR_CONTRIBUTORS = /^(architecture|changes|contributing|releasing|decisions\/|how-it-works\/)/;

Scorer.objNameMatch = 30; // the entry of the very name comes first

Scorer.score = ([page, , , , score, , kind]) => {
  if (kind !== SearchResultKind.text) return score;
  const query = new URLSearchParams(window.location.search).get("q") ?? "";
  for (const word of Search._parseQuery(query)[1]) score += 2 * (WEIGHTS[word]?.[page] ?? 0);
  return FOR_CONTRIBUTORS.test(page) ? score - 5 : score;
};
