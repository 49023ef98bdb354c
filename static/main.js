/**
 * Wires the page: who shows what, and what happens on a click.
 *
 * @import { Model } from "./api.js"
 * @import { Conversation, Message } from "./conversation.js"
 */

import { servedModel } from "./api.js";
import { Announcer } from "./announcer.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { isEmpty, isRunning, tokensOf } from "./conversation.js";
import { byId, el, find } from "./dom.js";
import { openConfirm, openKey, openSettings } from "./dialogs.js";
import { draftOf, keepDraft } from "./drafts.js";
import { messageOf } from "./fault.js";
import { count, number } from "./format.js";
import { Log } from "./log.js";
import { loadKey, loadSettings, requestFields, saveKey, saveSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { statusOf } from "./status.js";
import { openStore } from "./store.js";
import { exportName, exportText, markdownText, newIn, readExport } from "./transfer.js";

const REVOKE_AFTER_MS = 60_000;

const app = byId("app");
const settingsDialog = find("#settings-dialog", HTMLDialogElement);
const context = byId("context");
const importFile = find("#import-file", HTMLInputElement);

/** @type {?Model} */
let model = null;
let settings = loadSettings();
const store = await openStore();

const announcer = new Announcer(byId("announcer"));
// What is wrong with the model the next request says.
const status = statusOf(byId("status"), loadKey, () => showModel().catch(() => {}));

const composer = new Composer({ send, keep: (draft) => keepDraft(draftName(), draft), stop: () => chat.stop() });

const log = new Log({
  retry,
  retryAutomatically: (answer) => chat.retryAutomatically(answer),
  dropRetry: (answer) => chat.dropRetry(answer),
  edit: (message) => composer.edit(message),
  versionsOf: (message) => chat.versionsOf(message),
  choose: showVersion,
  askForKey,
  openSettings: showSettings,
  newConversation: startNew,
});

const sidebar = new Sidebar({
  open: (conversation) => openConversation(conversation.id),
  rename: (conversation, title) => chat.rename(conversation, title),
  save: (conversation) => saveFile([conversation]),
  readAll: () => chat.readAll(),
  remove: askToRemove,
});

const chat = new Chat(
  store,
  { showConversation, showMessage, showVersions: () => log.showVersions(), showList, showUnkept },
  { fields, systemPrompt: () => settings.systemPrompt, isKept: () => settings.kept === "server", key: loadKey },
);

/** @param {Conversation} conversation */
function showConversation(conversation) {
  const messages = chat.shown;
  const empty = messages.length === 0;
  app.classList.toggle("empty", empty);
  document.title = empty ? "Penstock" : `${conversation.title} · Penstock`;
  showAddress(empty ? "" : `#${conversation.id}`);
  log.show(messages);
  showList();
  showContext();
}

/** @param {Message} message */
function showMessage(message) {
  log.update(message);
  const shown = chat.current.messages.includes(message);
  if (shown) announcer.follow(message, !isRunning(message));
  if (shown && !isRunning(message)) showContext();
  if (message.error?.kind === "unreachable" || message.state === "reconnecting") status.open();
}

function showList() {
  sidebar.show(chat.conversations, chat.current.id, chat.running);
  composer.setBusy(chat.isBusy);
}

function showUnkept() {
  byId("unkept").hidden = false;
}

/** @param {Message} message  @param {number} step */
function showVersion(message, step) {
  chat.choose(message);
  log.show(chat.shown, { message, step });
}

/** How much of the model's context the branch that is shown takes, as of its last answer. */
function showContext() {
  const used = tokensOf(chat.shown);
  const most = model?.max_model_len;
  context.hidden = !most || used === 0;
  if (!most || used === 0) return;
  find("meter", HTMLMeterElement, context).value = Math.min(1, used / most);
  find("span", HTMLElement, context).textContent = `${count(used, "token")} of ${number(most)}`;
}

/**
 * The address names the conversation: a reload and the Back button find it. One that is no more leaves no entry behind.
 * @param {string} hash
 */
function showAddress(hash) {
  if (location.hash === hash) return;
  const isKnown = location.hash === "" || chat.conversations.some(({ id }) => `#${id}` === location.hash);
  history[isKnown ? "pushState" : "replaceState"](null, "", hash || location.pathname);
}

/** @param {?string} id */
async function openConversation(id) {
  await chat.open(id);
  composer.restore(draftOf(draftName()));
  sidebar.closeDrawer();
  composer.focus();
}

/** A conversation that is not begun has a new id after each reload. */
function draftName() {
  return isEmpty(chat.current) ? "" : chat.current.id;
}

function startNew() {
  openConversation(null);
}

/** @param {string} text  @param {?Message} edited */
function send(text, edited) {
  chat.send(text, edited);
  log.follow();
}

/** The button that was pressed goes away with its card: the focus has to go somewhere. @param {Message} answer */
function retry(answer) {
  chat.retry(answer);
  composer.focus();
}

/** @param {Conversation} conversation */
function askToRemove(conversation) {
  openConfirm(find("#confirm", HTMLDialogElement), `Delete “${conversation.title}”?`, () => {
    keepDraft(conversation.id, "");
    chat.remove(conversation);
  });
}

/** @param {Conversation[]} conversations */
async function saveFile(conversations) {
  await chat.readAll();
  download(exportText(conversations), "application/json", exportName(conversations, Date.now()));
}

function saveText() {
  const { current } = chat;
  download(markdownText(current), "text/markdown", exportName([current], Date.now(), "md"));
}

/** @param {string} text  @param {string} type  @param {string} name */
function download(text, type, name) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), REVOKE_AFTER_MS);
}

/** @param {File} file */
async function openFile(file) {
  byId("imported").textContent = await file
    .text()
    .then((text) => {
      const added = newIn(readExport(text), chat.conversations);
      chat.add(added);
      return added.length === 0 ? "Everything in this file is here already." : `Imported ${added.length}.`;
    })
    .catch(messageOf);
}

function askForKey() {
  openKey(find("#key-dialog", HTMLDialogElement), loadKey(), (key, remember) => {
    saveKey(key, remember);
    showModel().catch(() => {});
    const last = chat.shown.at(-1);
    if (last?.error?.status === 401) retry(last);
  });
}

async function fields() {
  if (model === null) await showModel();
  return { model: model?.id ?? "", ...requestFields(settings, Boolean(model?.reasoning)) };
}

async function showModel() {
  model = await servedModel(loadKey());
  const name = model?.id ?? "";
  byId("model").textContent = name;
  byId("model").title = model?.max_model_len ? `${name}, ${model.max_model_len} tokens of context` : name;
  app.classList.toggle("demo", name.includes("demo"));
  showContext();
}

function showSettings() {
  const own = chat.current.systemPrompt;
  openSettings(settingsDialog, { settings, own, model }, (chosen, ownPrompt) => {
    settings = chosen;
    saveSettings(settings);
    if (ownPrompt !== own) chat.setSystemPrompt(ownPrompt);
  });
}

byId("skip").addEventListener("click", () => byId("field").focus());
byId("new").addEventListener("click", startNew);
byId("download").addEventListener("click", saveText);
byId("settings").addEventListener("click", showSettings);
byId("export").addEventListener("click", () => saveFile(chat.conversations));
byId("import").addEventListener("click", () => importFile.click());
importFile.addEventListener("change", () => {
  const file = importFile.files?.[0];
  if (file !== undefined) openFile(file);
  importFile.value = ""; // the same file can be chosen again
});
byId("change-key").addEventListener("click", () => {
  settingsDialog.close();
  askForKey();
});
byId("suggestions").addEventListener("click", ({ target }) => {
  if (target instanceof HTMLButtonElement) send(target.textContent, null);
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || event.isComposing) return;
  if (event.key === "Escape") {
    if (composer.isEditing) composer.stopEditing();
    else chat.stop();
  } else if (event.code === "KeyO" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startNew();
  } else if (event.code === "KeyK" && !event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    sidebar.search();
  }
});
window.addEventListener("popstate", () => openConversation(location.hash.slice(1)));

if (/Mac|iP(hone|ad|od)/.test(navigator.platform)) {
  find(".search kbd", HTMLElement).textContent = "⌘ K";
  byId("new").title = "⌘ Shift O";
}
if (!store.durable) showUnkept();
await chat.load();
await openConversation(location.hash.slice(1));
app.classList.remove("starting");
status.open();
