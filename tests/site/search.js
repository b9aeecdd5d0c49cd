// node search.js SITE QUERY…: print what the search of the built site finds, as JSON: for each query, addresses in order.

const fs = require("fs");
const vm = require("vm");
const [site, ...queries] = process.argv.slice(2);

const element = { lastChild: null };
const scope = {
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  URLSearchParams,
  _: (text) => text,
  _ready: () => {},
  document: { getElementById: () => element },
  location: { protocol: "https:", search: "" },
};
scope.window = scope;
vm.createContext(scope);
const names = ["searchtools", "language_data", "weights"].map((name) => `_static/${name}.js`);
for (const name of [...names, "searchindex.js"]) {
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8"), scope, name);
}
const found = queries.map((query) => {
  scope.location.search = `?q=${encodeURIComponent(query)}`;
  scope.query = query;
  const results = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", scope);
  return results.reverse().map(([page, , anchor]) => page + anchor);
});
console.log(JSON.stringify(found));
